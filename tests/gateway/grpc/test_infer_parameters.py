"""Values that go along with the tensors of ModelInfer: parameters, metadata, requested outputs, classification."""

from typing import Any

import pytest
from tritonclient.grpc import service_pb2

from gateway.options.grpc import GrpcOptions
from pipelines.text.model import text_model_of
from serving.request import InferResponse, Parameters, SequenceFlag
from tests.gateway.grpc.parts import (
    INVALID,
    EchoModel,
    FunctionModel,
    add_input,
    failure,
    infer_request,
    serving,
    set_parameters,
)
from tests.gateway.v2.small_service import SmallService


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
