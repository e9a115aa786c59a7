"""Requests over gRPC: ModelInfer with random tensors, and ModelStreamInfer of a language model.

Messages and stubs come from tritonclient, which any client of Triton has.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import urlsplit

import grpc
import grpc.aio
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from sluice.load.apis import Api, ParsedEvent
from sluice.load.apis.base import AskedRequest
from sluice.load.apis.triton import Input, TensorMetadata, draw_inputs, planned_inputs, raw_bytes
from sluice.load.callers import Caller, Clock, until
from sluice.load.config import ApiKind, LoadConfigError, LoadTarget, Workload
from sluice.load.stream import Failure, FailureKind, PlannedRequest, StreamReader

_MAX_MESSAGE_BYTES = (1 << 31) - 1


class GrpcApi(Api):
    """The facts of an answer over gRPC, whose messages need no parsing here."""

    has_terminator: ClassVar = False
    route: ClassVar = ""
    event: ClassVar = Any

    def fields(self, asked: AskedRequest) -> dict[str, Any]:
        raise AssertionError("messages of gRPC are made by GrpcCaller")

    def parse(self, data: bytes) -> ParsedEvent:
        raise AssertionError("messages of gRPC are read by GrpcCaller")


class GrpcInferApi(GrpcApi):
    """ModelInfer: one answer, without tokens."""

    has_output_tokens: ClassVar = False


@dataclass(slots=True)
class GrpcCaller(Caller):
    """Sends requests over one channel, as tritonclient does. Use as an async context manager."""

    target: LoadTarget
    workload: Workload
    model: str
    clock: Clock
    api: GrpcApi = field(init=False)
    _channel: grpc.aio.Channel = field(init=False)
    _stub: Any = field(init=False)
    _inputs: list[Input] = field(default_factory=list)
    _metadata: Sequence[TensorMetadata] = ()

    async def __aenter__(self) -> "GrpcCaller":
        """Open the channel and read the model's inputs. Raises `LoadConfigError` where that cannot be done."""
        is_stream = self.target.api is ApiKind.GRPC_STREAM
        self.api = GrpcApi() if is_stream else GrpcInferApi()
        self._channel = _channel(self.target.url)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        try:
            request = service_pb2.ModelMetadataRequest(name=self.model)
            answer = await self._stub.ModelMetadata(request, metadata=self._headers(), timeout=self.target.timeout_s)
        except grpc.aio.AioRpcError as error:
            await self._channel.close()
            raise LoadConfigError(f"{self.target.url}, model {self.model}: {error.details()}") from None
        self._metadata = [TensorMetadata(each.name, each.datatype, list(each.shape)) for each in answer.inputs]
        if not is_stream:
            self._inputs = planned_inputs(self.model, self._metadata, self.workload)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def call(self, planned: PlannedRequest, reader: StreamReader, leaving: asyncio.Event) -> Failure | None:
        reader.on_status(200)
        exchange = self._exchange(planned, reader)
        try:
            await (exchange if planned.leaves_after is None else until(leaving, exchange))
        except grpc.aio.AioRpcError as error:
            return _failure(error, reader)
        return None

    async def _exchange(self, planned: PlannedRequest, reader: StreamReader) -> None:
        settings = {"metadata": self._headers(), "timeout": self.target.timeout_s}
        if self.target.api is ApiKind.GRPC_INFER:
            tensors = draw_inputs(self._inputs, planned.prompt)
            answer = await self._stub.ModelInfer(self._request(tensors), **settings)
            error = None if answer.outputs else "an answer without outputs"
            reader.take(ParsedEvent(error=error), self.clock.now())
            return
        request = self._request(_text_tensors(self._metadata, planned, self.workload))
        # One stream a request, so that a client that leaves cancels its own alone.
        async for message in self._stub.ModelStreamInfer(_one(request), **settings):
            reader.take(_read(message), self.clock.now())

    def _request(self, tensors: "Sequence[tuple[Input, np.ndarray[Any, Any]]]") -> Any:
        request = service_pb2.ModelInferRequest(model_name=self.model)
        for each, values in tensors:
            request.inputs.add(name=each.name, datatype=each.datatype, shape=each.shape)
            request.raw_input_contents.append(raw_bytes(each, values))
        return request

    def _headers(self) -> tuple[tuple[str, str], ...]:
        return tuple((name.lower(), value) for name, value in self.target.headers)


def _channel(url: str) -> grpc.aio.Channel:
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if not parts.hostname:
        raise LoadConfigError(f"url {url!r}: write it as http://host:port of the server's gRPC port")
    address = f"{parts.hostname}:{parts.port or 8001}"
    options = [
        ("grpc.max_send_message_length", _MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", -1),
        ("grpc.enable_http_proxy", 0),  # the server is measured, as over HTTP, not the way through a proxy
    ]
    if parts.scheme == "https":
        return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(), options)
    return grpc.aio.insecure_channel(address, options)


def _text_tensors(
    metadata: Sequence[TensorMetadata], planned: PlannedRequest, workload: Workload
) -> "list[tuple[Input, np.ndarray[Any, Any]]]":
    """Return the inputs of a language model that the model's metadata names, of type and rank as it names them."""
    values: dict[str, Any] = {
        "text_input": planned.prompt,
        "max_tokens": planned.output_tokens,
        "stream": True,
        "temperature": 0.0,
        "return_num_output_tokens": True,
        "exclude_input_in_output": True,
        **({"ignore_eos": True} if workload.ignore_eos else {}),
        **workload.extra_body,
    }
    known = {each.name: each for each in metadata}
    if "text_input" not in known:
        raise LoadConfigError(f"the model has no input text_input; it has {', '.join(known) or 'none'}")
    return [_filled(known[name], value) for name, value in values.items() if name in known]


def _filled(metadata: TensorMetadata, value: Any) -> "tuple[Input, np.ndarray[Any, Any]]":
    shape = (1,) * len(metadata.shape)
    types = {"BYTES": "U", "BOOL": "?", "INT32": "<i4", "INT64": "<i8", "UINT64": "<u8", "UINT32": "<u4"}
    kind = np.dtype(types.get(metadata.datatype, "<f4"))
    return Input(metadata.name, metadata.datatype, shape), np.array([value], kind).reshape(shape)


async def _one(request: Any) -> AsyncIterator[Any]:
    yield request


def _read(message: Any) -> ParsedEvent:
    """Read a message of a stream: its text, and its number of tokens where the server counts them."""
    if message.error_message:
        return ParsedEvent(error=message.error_message)
    response = message.infer_response
    raw = dict(zip((each.name for each in response.outputs), response.raw_output_contents, strict=False))
    counted = raw.get("num_output_tokens")
    return ParsedEvent(
        has_text=len(raw.get("text_output", b"")) > _LENGTH_BYTES,
        text=_text(raw.get("text_output", b"")),
        num_tokens=int.from_bytes(counted, "little") if counted else None,
        finish_reason=_text(raw["finish_reason"]) if "finish_reason" in raw else None,
    )


_LENGTH_BYTES = 4
"""Bytes of the length in front of each text of a BYTES tensor."""


def _text(raw: bytes) -> str | None:
    return raw[_LENGTH_BYTES:].decode(errors="replace") or None


def _failure(error: grpc.aio.AioRpcError, reader: StreamReader) -> Failure:
    code = error.code()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Failure(FailureKind.TIMEOUT, str(error.details()))
    if code is grpc.StatusCode.UNAVAILABLE:
        return Failure(FailureKind.CONNECTION, f"{error.details()} after {len(reader.times_s)} token events")
    return Failure(FailureKind.GRPC, str(error.details()), code.name)
