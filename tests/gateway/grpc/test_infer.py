import asyncio
import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.grpc.aio as triton_aio
from tritonclient.grpc import service_pb2
from tritonclient.utils import shared_memory

from gateway.options.grpc import GrpcOptions
from pipelines.text.model import text_model_of
from serving.request import InferResponse, Parameters, SequenceFlag
from sluice.errors import ErrorCode, SluiceError
from tests.gateway.grpc.parts import (
    EchoModel,
    FunctionModel,
    HeldModel,
    add_input,
    failure,
    infer_request,
    serving,
    set_parameters,
)
from tests.gateway.v2.small_service import SmallService

INVALID = "INVALID_ARGUMENT"


KEY = f"/sluice_grpc_{os.getpid()}"


@pytest.fixture
def region() -> Iterator[Any]:
    """64 bytes of shared memory under KEY, made by the stock client's utilities."""
    made = shared_memory.create_shared_memory_region("region", KEY, 64)
    yield made
    shared_memory.destroy_shared_memory_region(made)


def numbers(response: Any) -> list[int]:
    found: list[int] = np.frombuffer(response.raw_output_contents[0], np.int32).tolist()
    return found


def typed_request(datatype: str, shape: list[int], **contents: Any) -> Any:
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, datatype, shape).contents.MergeFrom(service_pb2.InferTensorContents(**contents))
    return request


async def test_one_request_and_its_response() -> None:
    async with serving(SmallService(EchoModel(version=3))) as running:
        response = await running.stub.ModelInfer(infer_request("echo", 1, 2, id="r1"))
        assert (response.model_name, response.model_version, response.id) == ("echo", "3", "r1")
        assert [(each.name, each.datatype, list(each.shape)) for each in response.outputs] == [
            ("OUTPUT0", "INT32", [2])
        ]
        assert numbers(response) == [1, 2]
        assert not response.parameters


async def test_the_stock_client_without_asyncio() -> None:
    values = np.arange(16, dtype=np.float32).reshape(1, 16)

    def infer(target: str) -> Any:
        with triton.InferenceServerClient(target) as client:
            assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("echo")
            given = triton.InferInput("INPUT0", [1, 16], "FP32")
            given.set_data_from_numpy(values)
            return client.infer("echo", [given], request_id="sync").as_numpy("OUTPUT0")

    async with serving(SmallService(EchoModel(datatype="FP32", dims=(-1, -1)))) as running:
        assert np.array_equal(await asyncio.to_thread(infer, running.target), values)


async def test_the_stock_client_with_asyncio() -> None:
    texts = np.array([[b"caf\xc3\xa9", b"", b"\xff\0"]], np.object_)
    async with (
        serving(SmallService(EchoModel(datatype="BYTES", dims=(-1, -1)))) as running,
        triton_aio.InferenceServerClient(running.target) as client,
    ):
        given = triton_aio.InferInput("INPUT0", [1, 3], "BYTES")
        given.set_data_from_numpy(texts)
        result = await client.infer("echo", [given])
        assert result.as_numpy("OUTPUT0").tolist() == texts.tolist()


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("UINT8", "uint_contents", [1, 255]),
        ("UINT16", "uint_contents", [1, 65535]),
        ("UINT32", "uint_contents", [1, 2**32 - 1]),
        ("UINT64", "uint64_contents", [1, 2**64 - 1]),
        ("INT8", "int_contents", [1, -128]),
        ("INT16", "int_contents", [1, -32768]),
        ("INT32", "int_contents", [1, -(2**31)]),
        ("INT64", "int64_contents", [1, -(2**63)]),
        ("FP32", "fp32_contents", [1.5, float("inf")]),
        ("FP64", "fp64_contents", [1.5, -0.1]),
        ("BYTES", "bytes_contents", [b"a", b"\xff\0"]),
    ],
)
async def test_typed_contents(datatype: str, field: str, values: list[Any]) -> None:
    model = EchoModel(datatype=datatype)
    async with serving(SmallService(model)) as running:
        await running.stub.ModelInfer(typed_request(datatype, [2], **{field: values}))
    assert model.jobs[0].request.inputs["INPUT0"].array.tolist() == values


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", 256), ("INT8", -129), ("INT16", 40000), ("UINT16", 65536)])
async def test_contents_that_overflow_are_refused(datatype: str, value: int) -> None:
    field = "uint_contents" if datatype.startswith("U") else "int_contents"
    async with serving(SmallService(EchoModel(datatype=datatype))) as running:
        code, message = await failure(running.stub.ModelInfer(typed_request(datatype, [2], **{field: [1, value]})))
    assert code == INVALID
    assert message.endswith(f"{value} is out of range for datatype '{datatype}'")


@pytest.mark.parametrize(
    ("datatype", "contents", "message"),
    [
        (
            "INT32",
            {"int64_contents": [1]},
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo' of type 'INT64', "
            "expected datatype 'INT32'",
        ),
        (
            "FP16",
            {"fp32_contents": [1]},
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo' of type 'FP32', "
            "expected datatype 'FP16'",
        ),
        (
            "INT32",
            {"int_contents": [1], "fp32_contents": [1]},
            "unexpected explicit tensor data for input tensor 'INPUT0' for model 'echo', "
            "binary data was already supplied.",
        ),
        (
            "INT32",
            {},
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'echo'. "
            "Expected 4, got 0",
        ),
        (
            "INT32",
            {"int_contents": [1, 2]},
            "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'echo'. "
            "Expected 4, got 8",
        ),
    ],
)
async def test_contents_that_are_wrong(datatype: str, contents: dict[str, Any], message: str) -> None:
    """The errors have the real server's words."""
    async with serving(SmallService(EchoModel(datatype=datatype))) as running:
        request = typed_request(datatype, [1], **contents)
        request.inputs[0].contents.SetInParent()
        assert await failure(running.stub.ModelInfer(request)) == (INVALID, message)


async def test_where_the_data_is_missing_or_doubled() -> None:
    async with serving(SmallService(EchoModel())) as running:
        infer = running.stub.ModelInfer
        without = service_pb2.ModelInferRequest(model_name="echo")
        add_input(without, "INT32", [1])
        assert await failure(infer(without)) == (
            INVALID,
            "unable to find data for input tensor 'INPUT0' for model 'echo' in request.",
        )
        both = infer_request("echo", 1)
        both.inputs[0].contents.int_contents.append(1)
        assert await failure(infer(both)) == (
            INVALID,
            "contents field must not be specified when using raw_input_contents for 'INPUT0' for model 'echo'",
        )
        twice = infer_request("echo", 1, id="t")
        add_input(twice, "INT32", [1], bytes(4))
        assert await failure(infer(twice)) == (INVALID, "[request id: t] input 'INPUT0' already exists in request")
        unused = infer_request("echo", 1)
        unused.raw_input_contents.append(b"more")
        assert numbers(await infer(unused)) == [1]


@pytest.mark.parametrize("datatype", ["", "FOO", "int32"])
async def test_types_that_do_not_exist(datatype: str) -> None:
    request = infer_request("echo", 1)
    request.inputs[0].datatype = datatype
    async with serving(SmallService(EchoModel())) as running:
        assert await failure(running.stub.ModelInfer(request)) == (
            INVALID,
            "[request id: <id_unknown>] inference input 'INPUT0' data-type is '<invalid>', "
            "but model 'echo' expects 'INT32'",
        )


async def test_models_and_versions_that_are_not_there() -> None:
    async with serving(SmallService(EchoModel(version=1), EchoModel(version=2))) as running:
        infer = running.stub.ModelInfer
        assert (await infer(infer_request("echo", 1))).model_version == "2"
        assert (await infer(infer_request("echo", 1, version="1"))).model_version == "1"
        assert await failure(infer(infer_request("nope", 1))) == (
            "NOT_FOUND",
            "Request for unknown model: 'nope' is not found",
        )
        assert await failure(infer(infer_request("echo", 1, version="9"))) == (
            "NOT_FOUND",
            "Request for unknown model: 'echo' version 9 is not found",
        )
        code, message = await failure(infer(infer_request("nope", 1, version="abc")))
        assert code == INVALID and "'abc' (details: stol)" in message


async def test_a_malformed_message_is_refused_and_nothing_else_suffers() -> None:
    async with serving(SmallService(EchoModel())) as running:
        call = running.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        assert await failure(call(b"\xff\xff\xff\xff")) == ("INTERNAL", "Unable to parse request")
        assert (await failure(running.channel.unary_unary("/inference.GRPCInferenceService/Nope")(b"")))[
            0
        ] == "UNIMPLEMENTED"
        assert numbers(await running.stub.ModelInfer(infer_request("echo", 5))) == [5]


async def test_damaged_messages_never_fail_unexpectedly(caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(20)
    request = infer_request(
        "echo", 1, 2, id="x", version="1", outputs=["OUTPUT0"], parameters={"priority": 1, "a": "b"}
    )
    set_parameters(request.outputs[0].parameters, {"classification": 1})
    whole = request.SerializeToString()
    async with serving(SmallService(EchoModel())) as running:
        call = running.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(400):
            damaged = bytearray(whole)
            for _ in range(chance.randint(1, 3)):
                damaged[chance.randrange(len(damaged))] = chance.randrange(256)
            with suppress(grpc.RpcError):
                await call(bytes(damaged))
        assert (await running.stub.ModelInfer(request)).id == "x"
    assert "unexpectedly" not in caplog.text


async def test_what_parameters_mean() -> None:
    model = EchoModel()
    given = {
        "sequence_id": 7,
        "sequence_start": True,
        "sequence_end": True,
        "priority": 2,
        "timeout": 20,
        "flag": False,
        "count": -5,
        "text": "x",
        "ratio": 1.5,
    }
    async with serving(SmallService(model)) as running:
        await running.stub.ModelInfer(infer_request("echo", 1, parameters=given))
        await running.stub.ModelInfer(infer_request("echo", 1, parameters={"sequence_id": "abc"}))
        await running.stub.ModelInfer(infer_request("echo", 1, parameters={"priority": ("uint64_param", 3)}))
    first, second, third = (job.request for job in model.jobs)
    assert (first.correlation_id, first.sequence) == (7, SequenceFlag.START | SequenceFlag.END)
    assert (first.priority, first.timeout_us, first.protocol) == (2, 20, "v2_grpc")
    assert first.parameters == {"flag": False, "count": -5, "text": "x", "ratio": 1.5}
    assert (second.correlation_id, second.sequence) == ("abc", SequenceFlag.NONE)
    assert third.priority == 3


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            {"sequence_id": True},
            "invalid value type for 'sequence_id' parameter, expected int64_param or string_param.",
        ),
        ({"sequence_start": 1}, "invalid value type for 'sequence_start' parameter, expected bool_param."),
        ({"sequence_end": "1"}, "invalid value type for 'sequence_end' parameter, expected bool_param."),
        ({"priority": "2"}, "invalid value type for 'priority' parameter, expected int64_param or uint64_param."),
        ({"priority": -2}, "invalid value for 'priority', expected value >= 0."),
        ({"timeout": ("uint64_param", 2)}, "invalid value type for 'timeout' parameter, expected int64_param."),
        (
            {"u": ("uint64_param", 2)},
            "invalid value type for 'u' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            {"triton_foo": True},
            "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys starting "
            "with 'triton_' are allowed: triton_enable_empty_final_response",
        ),
        (
            {"triton_enable_empty_final_response": 1},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
    ],
)
async def test_parameters_of_the_wrong_kind(parameters: dict[str, Any], message: str) -> None:
    async with serving(SmallService(EchoModel())) as running:
        assert await failure(running.stub.ModelInfer(infer_request("echo", 1, parameters=parameters))) == (
            INVALID,
            message,
        )


async def test_parameters_of_a_response() -> None:
    parameters: Parameters = {"flag": True, "count": 2**63, "less": -1, "text": "é", "ratio": 0.5}
    model = FunctionModel("echo", lambda job: job.respond(InferResponse([], parameters)))
    async with serving(SmallService(model)) as running:
        response = await running.stub.ModelInfer(infer_request("echo", 1))
    found = {
        name: (value.WhichOneof("parameter_choice"), getattr(value, value.WhichOneof("parameter_choice")))
        for name, value in response.parameters.items()
    }
    assert found == {
        "flag": ("bool_param", True),
        "count": ("uint64_param", 2**63),
        "less": ("int64_param", -1),
        "text": ("string_param", "é"),
        "ratio": ("double_param", 0.5),
    }


async def test_metadata_that_is_forwarded() -> None:
    model = EchoModel()
    options = GrpcOptions(port=0, header_forward_pattern="X-FWD-.")
    metadata = (
        ("x-fwd-user", "bob"),
        ("x-other", "z"),
        ("also-x-fwd-a", "yes"),
        ("x-fwd-", "no"),
        ("x-fwd-raw-bin", b"\xc3\xa9"),
    )
    async with serving(SmallService(model), options) as running:
        request = infer_request("echo", 1, parameters={"x-fwd-user": "me", "kept": 1})
        await running.stub.ModelInfer(request, metadata=metadata)
    assert model.jobs[0].request.parameters == {
        "kept": 1,
        "x-fwd-user": "bob",
        "also-x-fwd-a": "yes",
        "x-fwd-raw-bin": "é",
    }


async def test_the_tenant_of_an_llm() -> None:
    class TextModel(EchoModel):
        """Generates text."""

    def of_text_model(model: TextModel) -> Any:
        return "not None"

    text_model_of.register(TextModel, of_text_model)
    model = TextModel("llm")
    request = infer_request("llm", 1)
    async with serving(SmallService(model)) as running:
        await running.stub.ModelInfer(request, metadata=(("x-sluice-tenant", "team-a"),))
        await running.stub.ModelInfer(request)
        refused = running.stub.ModelInfer(request, metadata=(("x-sluice-tenant", "a" * 129),))
        assert await failure(refused) == (INVALID, "x-sluice-tenant must have at most 128 printable characters")
    assert [job.request.tenant for job in model.jobs] == ["team-a", ""]


async def test_requested_outputs_reach_the_model() -> None:
    model = EchoModel()
    async with serving(SmallService(model)) as running:
        await running.stub.ModelInfer(infer_request("echo", 1, outputs=["OUTPUT0"]))
        assert await failure(running.stub.ModelInfer(infer_request("echo", 1, outputs=["NOPE"]))) == (
            INVALID,
            "unexpected inference output 'NOPE' for model 'echo'",
        )
    assert model.jobs[0].request.requested_outputs == ("OUTPUT0",)


async def test_classification() -> None:
    request = infer_request("echo", 3, 9, 1, 9, outputs=["OUTPUT0"])
    set_parameters(request.outputs[0].parameters, {"classification": 2})
    async with serving(SmallService(EchoModel(labels=("zero", "one")))) as running:
        response = await running.stub.ModelInfer(request)
        assert (response.outputs[0].datatype, list(response.outputs[0].shape)) == ("BYTES", [2])
        assert response.raw_output_contents[0] == b"\x07\0\0\0" + b"9:1:one" + b"\x03\0\0\0" + b"9:3"


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"classification": 0}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"classification": -1}, "invalid value for 'classification' parameter, expected >= 0"),
        ({"classification": "2"}, "invalid value type for 'classification' parameter, expected int64_param"),
    ],
)
async def test_classification_that_is_wrong(parameters: dict[str, Any], message: str) -> None:
    request = infer_request("echo", 1, outputs=["OUTPUT0"])
    set_parameters(request.outputs[0].parameters, parameters)
    async with serving(SmallService(EchoModel())) as running:
        assert await failure(running.stub.ModelInfer(request)) == (INVALID, message)


async def test_classification_of_text_is_an_error() -> None:
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, "BYTES", [1], b"\x01\0\0\0a")
    set_parameters(request.outputs.add(name="OUTPUT0").parameters, {"classification": 1})
    async with serving(SmallService(EchoModel(datatype="BYTES"))) as running:
        code, message = await failure(running.stub.ModelInfer(request))
    assert (code, message) == (INVALID, "class result not available for output due to unsupported type 'BYTES'")


async def test_tensors_in_shared_memory(region: Any) -> None:
    """The stock client's shared memory utilities work at offsets."""
    values = np.array([3, 1, 2, 5], np.int32)
    shared_memory.set_shared_memory_region(region, [values], offset=8)
    model = EchoModel()
    async with (
        serving(SmallService(model)) as running,
        triton_aio.InferenceServerClient(running.target) as client,
    ):
        await client.register_system_shared_memory("data", KEY, 48, offset=4)
        given = triton_aio.InferInput("INPUT0", [4], "INT32")
        given.set_shared_memory("data", 16, offset=4)
        wanted = triton_aio.InferRequestedOutput("OUTPUT0")
        wanted.set_shared_memory("data", 20, offset=24)
        result = await client.infer("echo", [given], outputs=[wanted])
        assert list(result.get_response().raw_output_contents) == [b""]
        assert shared_memory.get_contents_as_numpy(region, np.int32, [4], offset=28).tolist() == values.tolist()
        await client.unregister_system_shared_memory("data")
        model.jobs.clear()  # they hold the input
        with pytest.raises(Exception, match="Unable to find shared memory region: 'data'"):
            await client.infer("echo", [given])


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (
            {"shared_memory_region": "data"},
            (
                INVALID,
                "'shared_memory_byte_size' must be specified along with 'shared_memory_region' parameter for tensor "
                "'INPUT0'",
            ),
        ),
        (
            {"shared_memory_byte_size": 4},
            (
                INVALID,
                "'shared_memory_byte_size' can not be specified without 'shared_memory_region' parameter for tensor "
                "'INPUT0'",
            ),
        ),
        (
            {"shared_memory_offset": 4},
            (
                INVALID,
                "'shared_memory_offset' can not be specified without 'shared_memory_region' parameter for tensor "
                "'INPUT0'",
            ),
        ),
        (
            {"shared_memory_region": 1, "shared_memory_byte_size": 4},
            (
                INVALID,
                "invalid value type for 'shared_memory_region' parameter for tensor 'INPUT0', expected string_param.",
            ),
        ),
        (
            {"shared_memory_region": "data", "shared_memory_byte_size": "4"},
            (
                INVALID,
                "invalid value type for 'shared_memory_byte_size' parameter for tensor 'INPUT0', expected int64_param.",
            ),
        ),
        (
            {"shared_memory_region": "none", "shared_memory_byte_size": 4},
            ("NOT_FOUND", "Unable to find shared memory region: 'none'"),
        ),
        (
            {"shared_memory_region": "data", "shared_memory_byte_size": 4, "shared_memory_offset": 62},
            (INVALID, "Invalid offset + byte size for shared memory region: 'data'"),
        ),
        (
            {"shared_memory_region": "data", "shared_memory_byte_size": 8},
            (
                INVALID,
                "[request id: <id_unknown>] input byte size mismatch for input 'INPUT0' for model 'echo'. "
                "Expected 4, got 8",
            ),
        ),
    ],
)
async def test_inputs_in_shared_memory_that_are_wrong(
    region: Any, parameters: dict[str, Any], expected: tuple[str, str]
) -> None:
    service = SmallService(EchoModel())
    service.shared_memory.register("data", KEY, 0, 64)
    request = service_pb2.ModelInferRequest(model_name="echo")
    set_parameters(add_input(request, "INT32", [1]).parameters, parameters)
    async with serving(service) as running:
        assert await failure(running.stub.ModelInfer(request)) == expected


async def test_outputs_in_shared_memory_that_are_wrong(region: Any) -> None:
    service = SmallService(EchoModel())
    service.shared_memory.register("data", KEY, 0, 64)
    place = {"shared_memory_region": "data", "shared_memory_byte_size": 4}

    def asking(**parameters: Any) -> Any:
        request = infer_request("echo", 1, 2, outputs=["OUTPUT0"])
        set_parameters(request.outputs[0].parameters, {**place, **parameters})
        return request

    async with serving(service) as running:
        infer = running.stub.ModelInfer
        assert await failure(infer(asking())) == (
            "INTERNAL",
            "shared memory size specified with the request for output 'OUTPUT0' (4 bytes) should be at least 8 bytes "
            "to hold the results",
        )
        assert (await failure(infer(asking(shared_memory_offset=64))))[1] == (
            "Invalid offset for shared memory region: 'data'"
        )
        assert (await failure(infer(asking(classification=1))))[1] == (
            "output can't set both 'shared_memory_region' and 'classification'"
        )
        both = infer_request("echo", 1)
        del both.raw_input_contents[:]
        set_parameters(both.inputs[0].parameters, place)
        both.inputs[0].contents.int_contents.append(1)
        assert (await failure(infer(both)))[1] == (
            "unexpected 'content' provided when using shared memory for input tensor 'INPUT0' for model 'echo'"
        )


async def test_a_decoupled_model_is_for_streams() -> None:
    async with serving(SmallService(EchoModel(is_decoupled=True))) as running:
        for wrong_or_not in ([], ["NOPE"]):
            message = infer_request("echo", 1, outputs=wrong_or_not)
            set_parameters(message.parameters, {"priority": "no number"} if wrong_or_not else {})
            assert await failure(running.stub.ModelInfer(message)) == (
                "UNIMPLEMENTED",
                "ModelInfer RPC doesn't support models with decoupled transaction policy",
            )


async def test_an_error_of_the_model() -> None:
    error = SluiceError(ErrorCode.ALREADY_EXISTS, "failed as asked")
    async with serving(SmallService(FunctionModel("echo", lambda job: job.fail(error)))) as running:
        assert await failure(running.stub.ModelInfer(infer_request("echo", 1))) == ("ALREADY_EXISTS", "failed as asked")


async def test_a_failure_that_nobody_expected_is_told_without_its_text(caplog: pytest.LogCaptureFixture) -> None:
    def break_down(job: Any) -> None:
        raise ZeroDivisionError("a secret")

    async with serving(SmallService(FunctionModel("echo", break_down))) as running:
        code, message = await failure(running.stub.ModelInfer(infer_request("echo", 1)))
    assert code == "INTERNAL" and "a secret" not in message
    reference = message.rsplit(" ", 1)[1]
    assert reference in caplog.text and "a secret" in caplog.text


async def test_when_to_try_again() -> None:
    error = SluiceError(ErrorCode.OVERLOADED, "too much", retry_after_s=2.5)
    async with serving(SmallService(FunctionModel("echo", lambda job: job.fail(error)))) as running:
        call = running.stub.ModelInfer(infer_request("echo", 1))
        assert await failure(call) == ("RESOURCE_EXHAUSTED", "too much")
        assert dict(await call.trailing_metadata())["grpc-retry-pushback-ms"] == "2500"


async def test_a_client_that_cancels() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelInfer(infer_request("held", 1, id="left"))
        await asyncio.wait([asyncio.ensure_future(model.until(lambda: len(model.jobs) == 1))])
        call.cancel()
        await model.until(lambda: model.cancelled == ["left"])
        assert model.num_in_flight == 0


async def test_a_deadline_cancels_the_request() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelInfer(infer_request("held", 1, id="late"), timeout=0.1)
        assert (await failure(call))[0] == "DEADLINE_EXCEEDED"
        await model.until(lambda: model.cancelled == ["late"])


async def test_a_message_of_sixty_megabytes() -> None:
    raw = bytes(60_000_000)
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, "UINT8", [len(raw)], raw)
    async with serving(SmallService(EchoModel(datatype="UINT8"))) as running:
        response = await running.stub.ModelInfer(request)
    assert len(response.raw_output_contents[0]) == len(raw)


async def test_a_message_over_the_limit() -> None:
    options = GrpcOptions(port=0, max_input_bytes=10_000)
    async with serving(SmallService(EchoModel()), options) as running:
        code, message = await failure(running.stub.ModelInfer(infer_request("echo", *range(5000))))
        assert code == "RESOURCE_EXHAUSTED" and "10000" in message
        assert numbers(await running.stub.ModelInfer(infer_request("echo", 1))) == [1]


async def test_a_traced_request(tmp_path: Path) -> None:
    service = SmallService(EchoModel())
    service.trace = type(service.trace)(str(tmp_path / "trace.json"))
    service.trace.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "1"})
    async with serving(service) as running:
        await running.stub.ModelInfer(infer_request("echo", 1, id="traced"))
        await running.stub.ModelInfer(infer_request("echo", 1, id="not traced"))
    text = (tmp_path / "trace.json.0").read_text()
    assert '"request_id":"traced"' in text and "not traced" not in text
    for point in ("GRPC_WAITREAD_END", "REQUEST_START", "REQUEST_END", "GRPC_SEND_START"):
        assert text.count(f'"{point}"') == 1


async def test_requests_side_by_side_on_one_connection() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        calls = [running.stub.ModelInfer(infer_request("held", 1, id=str(number))) for number in range(20)]
        waiting = asyncio.gather(*calls)
        await model.until(lambda: len(model.jobs) == 20)
        for number in reversed(range(20)):
            model.send(str(number), number, is_final=True)
        assert [numbers(response) for response in await waiting] == [[number] for number in range(20)]
