"""One model behind real ports of both protocols, over any engine, and its answers without ids and times."""

import asyncio
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import orjson
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, triton_to_np_dtype

from sluice.engine.client.base import EngineClient
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig
from sluice.gateway.api.v2.grpc.server import GrpcServer
from sluice.gateway.assembly import make_application
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.front.listeners import listen, listener_url
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.server import Server
from tests.gateway.front.http.sse import events_of
from tests.gateway.repositories import empty_server, llm_model
from tests.stand_ins.engines import fork_engines
from tests.stand_ins.paths import PYTHONPATH
from tests.waiting import PATIENCE_S

MODEL = "rill"
REQUEST_ID = {"x-request-id": "same"}
_MODULE = "sluice.engine.delegated.tensorrt_llm.process"
_CHANGING = re.compile(rb'"(created|system_fingerprint)":(\d+|"\w+")')
_LISTS = ("content", "tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Fields of log probabilities that grow with the text."""


@dataclass(frozen=True)
class Answering:
    """A server with one model."""

    client: httpx.Client
    stub: Any
    engine: EngineClient
    server: Server

    def openai(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and answer; for a stream, its events with the pieces of a text joined."""
        answer = self.client.post(path, json={"model": MODEL, **body}, headers=REQUEST_ID)
        content = _CHANGING.sub(rb'"\1":0', answer.content)
        if not body.get("stream") or answer.status_code != 200:
            return answer.status_code, content
        return answer.status_code, orjson.dumps(joined(events_of(content)))

    def generate(self, body: dict[str, Any]) -> tuple[int, bytes]:
        answer = self.client.post(f"/v2/models/{MODEL}/generate", json=body, headers=REQUEST_ID)
        return answer.status_code, answer.content

    def generate_stream(self, body: dict[str, Any]) -> tuple[int, list[str], dict[str, Any]]:
        """Return the status, the last event's keys, and all events joined."""
        answer = self.client.post(f"/v2/models/{MODEL}/generate_stream", json=body, headers=REQUEST_ID)
        if answer.status_code != 200:
            return answer.status_code, [], answer.json()
        events = events_of(answer.content)
        return answer.status_code, list(events[-1]), summed(events)

    def infer(self, inputs: list[dict[str, Any]], **parameters: Any) -> tuple[int, bytes]:
        """Infer over HTTP with JSON."""
        body = {"id": "same", "inputs": inputs, "parameters": parameters}
        answer = self.client.post(f"/v2/models/{MODEL}/infer", json=body, headers=REQUEST_ID)
        return answer.status_code, answer.content

    def model_infer(self, request: service_pb2.ModelInferRequest) -> bytes:
        """Infer over gRPC. Return the answer as on the wire, or status and text of the refusal."""
        try:
            return bytes(self.stub.ModelInfer(request, timeout=PATIENCE_S).SerializeToString(deterministic=True))
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}".encode()

    def model_stream_infer(self, request: service_pb2.ModelInferRequest) -> dict[str, Any]:
        """Stream over gRPC. Return all responses joined, or the error."""
        answers = list(self.stub.ModelStreamInfer(iter([request]), timeout=PATIENCE_S))
        errors = [answer.error_message for answer in answers if answer.error_message]
        responses = [answer.infer_response for answer in answers]
        ends = [_parameters(response) for response in responses]
        assert all(not end.get("triton_final_response") for end in ends[:-1])
        whole = summed([tensors(response) for response in responses if response.outputs])
        return {**whole, "errors": errors, "end": ends[-1], "id": responses[-1].id}


def _parameters(response: service_pb2.ModelInferResponse) -> dict[str, Any]:
    return {name: getattr(each, each.WhichOneof("parameter_choice")) for name, each in response.parameters.items()}


def tensors(response: service_pb2.ModelInferResponse) -> dict[str, list[Any]]:
    """Return the flat elements of each output by name."""
    found = {}
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if tensor.datatype == "BYTES":
            elements = [each.decode() for each in deserialize_bytes_tensor(raw)]
        else:
            elements = np.frombuffer(raw, triton_to_np_dtype(tensor.datatype)).tolist()
        assert int(np.prod(tensor.shape)) == len(elements)
        found[tensor.name] = elements
    return found


def joined(events: Sequence[Any]) -> list[Any]:
    """Join OpenAI's events: only how a text is split into pieces depends on timing, and whether its last piece comes
    with the end."""
    told: list[Any] = []
    for event in (part for each in events for part in _parts(each)):
        if told and _is_piece(event) and _is_piece(told[-1]) and _choice(event)["index"] == _choice(told[-1])["index"]:
            _add(_choice(told[-1]), _choice(event))
        else:
            told.append(event)
    return told


def _choice(event: Any) -> Any:
    return event["choices"][0]


def _text(event: Any) -> str | None:
    """Return the text of an event's choice; None where it has no place for one."""
    if event == "[DONE]" or not event.get("choices"):
        return None
    choice = _choice(event)
    text: str | None = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text


def _parts(event: Any) -> Iterator[Any]:
    """Yield an event, or the piece and the end that are one event."""
    if not _text(event) or _choice(event)["finish_reason"] is None:
        yield event
        return
    choice = _choice(event)
    yield event | {"choices": [choice | {"finish_reason": None}]}
    bare: dict[str, Any] = {"delta": {}} if "delta" in choice else {"text": ""}
    yield event | {"choices": [choice | bare | {"logprobs": None}]}


def _is_piece(event: Any) -> bool:
    return (
        _text(event) is not None
        and _choice(event)["finish_reason"] is None
        and "role" not in _choice(event).get("delta", ())
    )


def _add(before: Any, more: Any) -> None:
    if "delta" in before:
        before["delta"]["content"] += more["delta"]["content"]
    else:
        before["text"] += more["text"]
    for name in _LISTS:
        if before["logprobs"] and name in before["logprobs"]:
            before["logprobs"][name] += more["logprobs"][name]


def summed(responses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Join v2's responses, sequence by sequence: texts, token ids and their log probabilities concatenated, lengths
    added, the last value of all else. Which sequence is ahead depends on timing."""
    whole: dict[str, Any] = {}
    for response in sorted(responses, key=lambda response: _as_list(response.get("sequence_index", 0))):
        for name, value in response.items():
            whole[name] = _sum(whole[name], value, name) if name in whole else value
    return whole


def _sum(before: Any, more: Any, name: str) -> Any:
    if name == "text_output":
        return before + more if isinstance(before, str) else ["".join((*before, *more))]
    if name in ("output_ids", "output_log_probs"):
        return [*_as_list(before), *_as_list(more)]
    if name == "sequence_length":
        return before + more if isinstance(before, int) else [sum((*before, *more))]
    return more


def _as_list(value: Any) -> list[Any]:
    """Return a list: JSON has a single element without one."""
    return value if isinstance(value, list) else [value]


@contextmanager
def answering_stand_in(config: EngineConfig, version: str) -> Iterator[Answering]:
    """Serve the model of `config` by a version of TensorRT-LLM's stand-in, in an engine process."""
    with pytest.MonkeyPatch.context() as patch:
        fork_engines(patch)
        patch.setenv("PYTHONPATH", PYTHONPATH)
        patch.setenv("STAND_IN_VERSION", version)
        with answering(lambda: ProcessEngineClient(config, module=_MODULE), Path(config.model_path)) as running:
            assert running.engine.info.runtime_version == version
            yield running


@contextmanager
def answering(make_engine: Callable[[], EngineClient], checkpoint: Path) -> Iterator[Answering]:
    """Serve the model in `checkpoint` over an engine that is made, started and stopped on the server's thread."""
    ready, over = threading.Event(), threading.Event()
    started: list[tuple[str, str, EngineClient, Server] | BaseException] = []

    async def serve() -> None:
        engine = make_engine()
        await engine.start()
        server = empty_server()
        server.plane.repository.add(llm_model(MODEL, checkpoint, engine, server.metrics))
        await server.plane.repository.start()
        server.plane.health.begin_serving()
        listener = listen("127.0.0.1", 0, "--http-port")
        http, rpc = (
            HttpServer(make_application(server, ServeConfig()), listener),
            GrpcServer(server.v2, GrpcOptions(port=0), "127.0.0.1"),
        )
        http.start()
        target = f"127.0.0.1:{await rpc.start()}"
        started.append((listener_url(listener), target, engine, server))
        ready.set()
        await asyncio.to_thread(over.wait)
        await rpc.stop(0)
        await http.stop(PATIENCE_S)
        await server.rooms.close()
        listener.close()

    def run() -> None:
        try:
            asyncio.run(serve())
        except BaseException as error:
            started.append(error)
            ready.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        if isinstance(started[0], BaseException):
            raise started[0]
        url, target, engine, server = started[0]
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client, grpc.insecure_channel(target) as channel:
            yield Answering(client, service_pb2_grpc.GRPCInferenceServiceStub(channel), engine, server)
    finally:
        over.set()
        thread.join(PATIENCE_S)
