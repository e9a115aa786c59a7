"""A small service with models of its own, and a gRPC server over it on a free port."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc.server import GrpcServer
from sluice.gateway.calls import CallLog
from sluice.gateway.options.grpc import GrpcOptions
from sluice.gateway.tenancy.access.control import AccessControl
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferResponse
from sluice.serving.spec import build_spec
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Tensor
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

INVALID = "INVALID_ARGUMENT"
on_both_servers = pytest.mark.parametrize("server_name", ["sluice", "grpcio"], indirect=True)
"""Runs each test on Sluice's own server and on the one of the grpc package."""


class EchoModel(Model):
    """Answers at once: OUTPUT0 is INPUT0."""

    def __init__(
        self,
        name: str = "echo",
        datatype: str = "INT32",
        dims: Sequence[int] = (-1,),
        max_batch_size: int = 0,
        version: int = 1,
        is_decoupled: bool = False,
        labels: Iterable[str] = (),
    ) -> None:
        config = model_config_pb2.ModelConfig(name=name, backend="python", max_batch_size=max_batch_size)
        for tensor, tensor_name in ((config.input.add(), "INPUT0"), (config.output.add(), "OUTPUT0")):
            tensor.name = tensor_name
            tensor.data_type = model_config_pb2.DataType.Value(DATA_TYPES[datatype].config_name)
            tensor.dims.extend(dims)
        config.model_transaction_policy.decoupled = is_decoupled
        super().__init__(config, build_spec(config, version), {"OUTPUT0": tuple(labels)})
        self.jobs: list[InferJob] = []

    def _start(self, job: InferJob) -> None:
        self.jobs.append(job)
        job.respond(InferResponse([job.request.inputs["INPUT0"].renamed("OUTPUT0")]))

    async def close(self) -> None:
        pass


class HeldModel(EchoModel):
    """Answers when the test says so, and records cancelled jobs."""

    def __init__(self, name: str = "held", **settings: Any) -> None:
        super().__init__(name, **settings)
        self._changed = asyncio.Condition()
        self.cancelled: list[str] = []

    def _start(self, job: InferJob) -> None:
        self.jobs.append(job)
        job.on_cancel = lambda: self._cancel(job)
        self._announce()

    def _cancel(self, job: InferJob) -> None:
        self.cancelled.append(job.request.id)
        job.fail(SluiceError(ErrorCode.CANCELLED, "cancelled"))
        self._announce()

    def _announce(self) -> None:
        async def notify() -> None:
            async with self._changed:
                self._changed.notify_all()

        self._notifying = asyncio.get_running_loop().create_task(notify())

    def has_cancelled_all(self) -> bool:
        """Whether every request that has come is cancelled: one whose time was over sooner may not have come."""
        return self.cancelled == [job.request.id for job in self.jobs]

    async def until(self, claim: Callable[[], object]) -> None:
        """Wait until `claim` holds; it is checked when a request comes or is cancelled."""
        async with asyncio.timeout(PATIENCE_S), self._changed:
            await self._changed.wait_for(lambda: bool(claim()))

    def send(self, request_id: str, *values: int, is_final: bool = False, error: SluiceError | None = None) -> None:
        """Send one response; without values it is empty."""
        outputs = [Tensor.of("OUTPUT0", np.array(values, np.int32))] if values else []
        job = next(each for each in self.jobs if each.request.id == request_id)
        job.respond(InferResponse(outputs, error=error, is_final=is_final))


class FunctionModel(EchoModel):
    """Answers with the responses that a function makes of the job."""

    def __init__(self, name: str, respond: Callable[[InferJob], None], **settings: Any) -> None:
        super().__init__(name, **settings)
        self._respond = respond

    def _start(self, job: InferJob) -> None:
        self._respond(job)


server_name = "sluice"
"""The server that `serving` starts, as --grpc-server names it."""


class Running:
    """A server, and a channel to it."""

    def __init__(self, server: GrpcServer, port: int, channel: Any) -> None:
        self.server = server
        self.port = port
        self.target = f"127.0.0.1:{port}"
        self.channel = channel
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)


@asynccontextmanager
async def serving(
    service: SmallService, options: GrpcOptions | None = None, api_key: str | None = None
) -> AsyncIterator[Running]:
    """`service` on a free port, and a channel without TLS."""
    if api_key is not None:
        service.calls = CallLog(AccessControl(KeyRing(None, api_key)))
    options = replace(options or GrpcOptions(port=0), server=server_name)
    server = GrpcServer(service, options, "127.0.0.1")
    port = await server.start()
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with asyncio.timeout(PATIENCE_S):
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", unlimited) as channel:
                yield Running(server, port, channel)
        finally:
            await server.stop(0)
            service.shared_memory.close()


def infer_request(
    model: str = "echo",
    *values: int,
    id: str = "",
    version: str = "",
    outputs: Iterable[str] = (),
    parameters: dict[str, Any] | None = None,
) -> Any:
    """A ModelInferRequest with INPUT0 of `values` as raw INT32."""
    request = service_pb2.ModelInferRequest(model_name=model, model_version=version, id=id)
    add_input(request, "INT32", [len(values)], np.array(values, np.int32).tobytes())
    for name in outputs:
        request.outputs.add().name = name
    set_parameters(request.parameters, parameters or {})
    return request


def add_input(request: Any, datatype: str, shape: Sequence[int], raw: bytes | None = None, name: str = "INPUT0") -> Any:
    """Add an input to `request`, and return it."""
    tensor = request.inputs.add()
    tensor.name, tensor.datatype = name, datatype
    tensor.shape.extend(shape)
    if raw is not None:
        request.raw_input_contents.append(raw)
    return tensor


def set_parameters(parameters: Any, values: dict[str, Any]) -> None:
    """Set each parameter in the field of its type; a tuple names field and value."""
    kinds = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}
    for name, value in values.items():
        kind, given = value if isinstance(value, tuple) else (kinds[type(value)], value)
        setattr(parameters[name], kind, given)


async def failure(call: Any) -> tuple[str, str]:
    """Return the status and text that `call` ends in."""
    try:
        await call
    except grpc.RpcError as error:
        return error.code().name, error.details()
    raise AssertionError("the call did not fail")


def numbers(response: Any) -> list[int]:
    """Return the first output of a response, of type INT32."""
    found: list[int] = np.frombuffer(response.raw_output_contents[0], np.int32).tolist()
    return found
