"""Messages of gRPC with anything in them, damaged on their way, on Sluice's own HTTP/2 server."""

import asyncio
import logging
import random
import struct
import threading
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from sluice.gateway.api.v2.grpc.server import GrpcServer
from sluice.gateway.options.grpc import GrpcOptions
from tests.fuzz.damage import damaged
from tests.fuzz.running import fuzzed
from tests.gateway.api.v2.grpc.http2.calls import ECHO, serving_calls
from tests.gateway.api.v2.grpc.http2.conversations import converse
from tests.gateway.api.v2.grpc.parts import EchoModel, infer_request, numbers
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S, until

SERVICE = "/inference.GRPCInferenceService/"
MODELS = (
    EchoModel(),
    EchoModel("batched", dims=(2,), max_batch_size=4),
    EchoModel("strings", "BYTES"),
    EchoModel("bools", "BOOL"),
    EchoModel("halves", "FP16"),
    EchoModel("fixed", "FP64", dims=(2, 2)),
    EchoModel("decoupled", is_decoupled=True),
)
REFUSALS = {"INVALID_ARGUMENT", "NOT_FOUND", "UNAVAILABLE", "UNIMPLEMENTED", "RESOURCE_EXHAUSTED", "ALREADY_EXISTS"}
OF_TRITON = ("Unable to parse request", "Unable to open shared memory region", "failed to load 'nope'")
"""Begin the refusals that Triton answers with INTERNAL, and we do as it does."""

integers = st.sampled_from((0, 1, 2, 3, 4, -1, 8, 2**31 - 1, 2**32, 2**40, 2**62, 2**63 - 1, -(2**63)))
texts = st.sampled_from(("", "INPUT0", "OUTPUT0", "a", "1", "💥", "\0", "x" * 3000, "../..", "region", "-1", "é"))
datatypes = st.sampled_from(("INT32", "BYTES", "BOOL", "FP16", "FP64", "BF16", "INT8", "UINT64", "", "int32", "NOPE"))
shapes = st.lists(st.one_of(st.integers(0, 4), integers), max_size=4)
raws = st.one_of(
    st.integers(0, 40).map(bytes),
    st.binary(max_size=20),
    st.lists(st.binary(max_size=3), max_size=4).map(lambda each: b"".join(struct.pack("<I", len(x)) + x for x in each)),
    st.sampled_from((struct.pack("<I", 2**32 - 1), struct.pack("<I", 5) + b"ab", b"\1" * 70_000)),
)
PARAMETER_NAMES = (
    *("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "triton_enable_empty_final_response"),
    *("triton_x", "classification", "shared_memory_region", "shared_memory_offset", "shared_memory_byte_size"),
    *("binary_data", "unload_dependents", "config", "file:1/a", "max_tokens", "", "x" * 300),
)


@st.composite
def set_parameters(draw: st.DrawFn, parameters: Any) -> None:
    for name in draw(st.lists(st.sampled_from(PARAMETER_NAMES), max_size=2)):
        kind = draw(st.sampled_from(("bool_param", "int64_param", "string_param", "double_param", "uint64_param", "")))
        value: Any = draw(st.sampled_from((0, 1, 5, 2**40)))
        if kind == "string_param":
            value = draw(texts)
        elif kind == "double_param":
            value = draw(st.sampled_from((0.0, -1.0, float("nan"), float("inf"))))
        elif kind == "int64_param":
            value = draw(integers)
        if kind in parameters[name].DESCRIPTOR.fields_by_name:
            setattr(parameters[name], kind, bool(value) if kind == "bool_param" else value)
        else:
            parameters[name].SetInParent()


@st.composite
def set_contents(draw: st.DrawFn, contents: Any) -> None:
    contents.SetInParent()
    for name in draw(st.lists(st.sampled_from([each.name for each in contents.DESCRIPTOR.fields]), max_size=2)):
        values: Any = draw(st.lists(st.integers(0, 300), max_size=5)) * draw(st.sampled_from((1, 1, 1, 9000)))
        if name == "bytes_contents":
            values = [bytes(each) for each in values[:50]]
        elif name == "bool_contents":
            values = [bool(each) for each in values]
        getattr(contents, name).extend(values)


@st.composite
def infer_messages(draw: st.DrawFn) -> bytes:
    """A request to one of the models, from good to hostile, as it goes over the wire."""
    name = draw(st.sampled_from(("echo", "echo", *(model.name for model in MODELS), "", "nope", "\0")))
    request = service_pb2.ModelInferRequest(model_name=name, id=draw(texts))
    request.model_version = draw(st.sampled_from(("", "", "1", "2", "-1", "x", "1" * 400, "٣")))
    draw(set_parameters(request.parameters))
    for _ in range(draw(st.integers(0, 2))):
        tensor = request.inputs.add(name=draw(st.sampled_from(("INPUT0", "INPUT0", "x", ""))), datatype=draw(datatypes))
        tensor.shape.extend(draw(shapes))
        draw(set_parameters(tensor.parameters))
        if draw(st.booleans()):
            request.raw_input_contents.append(draw(raws))
        else:
            draw(set_contents(tensor.contents))
    for _ in range(draw(st.integers(0, 1))):
        output = request.outputs.add(name=draw(texts))
        draw(set_parameters(output.parameters))
    content: bytes = request.SerializeToString()
    return content if draw(st.booleans()) else draw(damaged(content))


@pytest.fixture(scope="module")
def problems() -> Iterator[list[str]]:
    """What the servers of this module log as errors."""
    found: list[str] = []

    class Recorder(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.ERROR or record.exc_info:
                found.append(self.format(record))

    recorder = Recorder()
    logging.getLogger().addHandler(recorder)
    yield found
    logging.getLogger().removeHandler(recorder)


class Server:
    """A server on a thread of its own, and a channel for blocking calls."""

    def __init__(self) -> None:
        self._over, self._ready = threading.Event(), threading.Event()
        self._port = 0
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        assert self._ready.wait(PATIENCE_S)
        self.channel = grpc.insecure_channel(f"127.0.0.1:{self._port}")
        self.infer = self.channel.unary_unary(SERVICE + "ModelInfer")

    async def _serve(self) -> None:
        service = SmallService(*MODELS)
        server = GrpcServer(service, GrpcOptions(port=0), "127.0.0.1")
        self._port = await server.start()
        self._ready.set()
        await asyncio.to_thread(self._over.wait)
        await server.stop(0)
        service.shared_memory.close()

    def check_alive(self) -> None:
        answer = self.infer(infer_request("echo", 3, 4).SerializeToString(), timeout=PATIENCE_S)
        assert numbers(service_pb2.ModelInferResponse.FromString(answer)) == [3, 4]

    def close(self) -> None:
        self.channel.close()
        self._over.set()
        self._thread.join(PATIENCE_S)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.close()


def check_refusal(error: grpc.RpcError) -> None:
    name, details = error.code().name, error.details()
    assert name in REFUSALS or (name == "INTERNAL" and details.startswith(OF_TRITON)), f"{name}: {details}"
    assert details


@fuzzed(40)
@given(infer_messages())
def test_a_request_is_answered_or_refused(server: Server, problems: list[str], content: bytes) -> None:
    try:
        answer = server.infer(content, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        check_refusal(error)
    else:
        service_pb2.ModelInferResponse.FromString(answer)
    server.check_alive()
    assert problems == []


@fuzzed(20)
@given(st.lists(infer_messages(), min_size=1, max_size=4))
def test_a_stream_answers_each_request_or_ends(server: Server, problems: list[str], contents: list[bytes]) -> None:
    stream = server.channel.stream_stream(SERVICE + "ModelStreamInfer")
    num_answers = 0
    try:
        for answer in stream(iter(contents), timeout=PATIENCE_S):
            response = service_pb2.ModelStreamInferResponse.FromString(answer)
            num_answers += 1
            assert response.error_message or response.HasField("infer_response")
    except grpc.RpcError as error:
        check_refusal(error)
    else:
        assert num_answers >= len(contents)
    server.check_alive()
    assert problems == []


SETTINGS = {
    method.name: method.input_type
    for method in service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods
    if method.name not in ("ModelInfer", "ModelStreamInfer")
}


@st.composite
def settings_messages(draw: st.DrawFn, descriptor: Any) -> bytes:
    """A message with some of its fields set."""
    message: Any = getattr(service_pb2, descriptor.name)()
    for field in descriptor.fields:
        if not draw(st.booleans()):
            continue
        if field.type == field.TYPE_STRING and not field.is_repeated:
            setattr(message, field.name, draw(st.one_of(texts, st.sampled_from(("echo", "nope", "polite", "/x")))))
        elif field.type == field.TYPE_BOOL:
            setattr(message, field.name, draw(st.booleans()))
        elif field.type in (field.TYPE_UINT64, field.TYPE_INT64):
            setattr(message, field.name, abs(draw(integers)) % 2**63)
        elif field.name == "parameters":
            draw(set_parameters(message.parameters))
        elif field.name == "settings":
            value = message.settings[draw(st.sampled_from(("trace_level", "trace_rate", "log_verbose_level", "x", "")))]
            if hasattr(value, "value"):
                value.value.extend(draw(st.lists(texts, max_size=2)))
            else:
                value.string_param = draw(texts)
    content: bytes = message.SerializeToString()
    return content if draw(st.booleans()) else draw(damaged(content))


@fuzzed(40)
@given(st.sampled_from(sorted(SETTINGS)), st.data())
def test_other_methods_answer_or_refuse(server: Server, problems: list[str], name: str, data: st.DataObject) -> None:
    content = data.draw(settings_messages(SETTINGS[name]))
    try:
        server.channel.unary_unary(SERVICE + name)(content, timeout=PATIENCE_S)
    except grpc.RpcError as error:
        check_refusal(error)
    server.check_alive()
    assert problems == []


@fuzzed(6)
@given(st.lists(st.integers(0, 2**32), min_size=1, max_size=6))
def test_conversations_that_go_wrong(problems: list[str], seeds: list[int]) -> None:
    async def converse_all() -> None:
        async with serving_calls() as calls:
            await asyncio.gather(*(converse(calls.port, random.Random(seed)) for seed in seeds))
            await until(lambda: not (calls.server.connections or calls.server.calls.tasks or calls.num_held))
            async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
                assert await channel.unary_unary(ECHO)(b"still there?", timeout=PATIENCE_S) == b"still there?"
                await calls.until_idle()

    asyncio.run(converse_all())
    assert problems == []
