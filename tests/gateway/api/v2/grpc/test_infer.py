"""ModelInfer, as far as the recorded answers do not show it."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import service_pb2

from sluice.gateway.options.grpc import GrpcOptions
from sluice.pipelines.text.model import text_model_of
from sluice.serving.backends.ensemble.backend import EnsembleModel
from sluice.serving.request import InferRequest, InferResponse, Parameters, SequenceFlag
from tests.gateway.api.v2.grpc.parts import (
    INVALID,
    EchoModel,
    FunctionModel,
    HeldModel,
    add_input,
    failure,
    infer_request,
    numbers,
    on_both_servers,
    serving,
    set_parameters,
)
from tests.gateway.api.v2.small_service import SmallService
from tests.serving.backends.builders import Lookup
from tests.serving.backends.ensemble import parts as ensembles
from tests.waiting import until

INFER = "/inference.GRPCInferenceService/ModelInfer"

# --- calls ---


@on_both_servers
async def test_a_malformed_message_is_refused_and_nothing_else_suffers() -> None:
    async with serving(SmallService(EchoModel())) as running:
        assert await failure(running.channel.unary_unary(INFER)(b"\xff\xff\xff\xff")) == (
            "INTERNAL",
            "Unable to parse request",
        )
        assert (await failure(running.channel.unary_unary(INFER[:-5] + "Nope")(b"")))[0] == "UNIMPLEMENTED"
        assert numbers(await running.stub.ModelInfer(infer_request("echo", 5))) == [5]


@on_both_servers
async def test_a_client_that_cancels_and_one_whose_time_is_over() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelInfer(infer_request("held", 1, id="left"))
        await asyncio.wait([asyncio.ensure_future(model.until(lambda: len(model.jobs) == 1))])
        call.cancel()
        await model.until(lambda: model.cancelled == ["left"])
        call = running.stub.ModelInfer(infer_request("held", 1, id="late"), timeout=0.1)
        assert (await failure(call))[0] == "DEADLINE_EXCEEDED"
        await model.until(model.has_cancelled_all)
        await until(lambda: model.num_in_flight == 0)


@on_both_servers
async def test_a_message_of_sixty_megabytes() -> None:
    raw = bytes(60_000_000)
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, "UINT8", [len(raw)], raw)
    async with serving(SmallService(EchoModel(datatype="UINT8"))) as running:
        response = await running.stub.ModelInfer(request)
    assert len(response.raw_output_contents[0]) == len(raw)


@on_both_servers
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


@on_both_servers
async def test_requests_side_by_side_on_one_connection() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        calls = [running.stub.ModelInfer(infer_request("held", 1, id=str(number))) for number in range(20)]
        waiting = asyncio.gather(*calls)
        await model.until(lambda: len(model.jobs) == 20)
        for number in reversed(range(20)):
            model.send(str(number), number, is_final=True)
        assert [numbers(response) for response in await waiting] == [[number] for number in range(20)]


# --- what a request says ---


async def test_contents_of_nothing_are_too_few() -> None:
    request = service_pb2.ModelInferRequest(model_name="echo")
    add_input(request, "INT32", [1]).contents.SetInParent()
    async with serving(SmallService(EchoModel())) as running:
        code, message = await failure(running.stub.ModelInfer(request))
    assert code == INVALID and message.endswith("Expected 4, got 0")


@pytest.mark.parametrize(("datatype", "value"), [("UINT8", 256), ("INT8", -129), ("INT16", 40000), ("UINT16", 65536)])
async def test_contents_that_overflow_are_refused(datatype: str, value: int) -> None:
    request = service_pb2.ModelInferRequest(model_name="echo")
    contents = add_input(request, datatype, [2]).contents
    (contents.uint_contents if datatype.startswith("U") else contents.int_contents).extend([1, value])
    async with serving(SmallService(EchoModel(datatype=datatype))) as running:
        code, message = await failure(running.stub.ModelInfer(request))
    assert code == INVALID and message.endswith(f"{value} is out of range for datatype '{datatype}'")


async def test_what_parameters_and_metadata_mean() -> None:
    model = EchoModel()
    meant = {"sequence_id": 7, "sequence_start": True, "sequence_end": True, "priority": 2, "timeout": 20}
    own = {"flag": False, "count": -5, "text": "x", "ratio": 1.5, "x-fwd-user": "me"}
    sent = (("x-fwd-user", "bob"), ("x-other", "z"), ("also-x-fwd-a", "yes"), ("x-fwd-raw-bin", b"\xc3\xa9"))
    options = GrpcOptions(port=0, header_forward_pattern="X-FWD-.")
    async with serving(SmallService(model), options) as running:
        request = infer_request("echo", 1, parameters=meant | own, outputs=["OUTPUT0"])
        await running.stub.ModelInfer(request, metadata=sent)
        await running.stub.ModelInfer(infer_request("echo", 1, parameters={"sequence_id": "abc"}))
    first, second = (job.request for job in model.jobs)
    assert (first.correlation_id, first.sequence) == (7, SequenceFlag.START | SequenceFlag.END)
    assert (first.priority, first.timeout_us, first.protocol) == (2, 20, "v2_grpc")
    assert first.requested_outputs == ("OUTPUT0",)
    forwarded = {"x-fwd-user": "bob", "also-x-fwd-a": "yes", "x-fwd-raw-bin": "é"}
    assert first.parameters == own | forwarded
    assert (second.correlation_id, second.sequence) == ("abc", SequenceFlag.NONE)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"sequence_end": "1"}, "invalid value type for 'sequence_end' parameter, expected bool_param."),
        ({"priority": -2}, "invalid value for 'priority', expected value >= 0."),
        ({"timeout": ("uint64_param", 2)}, "invalid value type for 'timeout' parameter, expected int64_param."),
        (
            {"u": ("uint64_param", 2)},
            "invalid value type for 'u' parameter, expected int64_param, bool_param, or string_param.",
        ),
        (
            {"triton_enable_empty_final_response": 1},
            "invalid value type for 'triton_enable_empty_final_response' parameter, expected bool_param.",
        ),
    ],
)
async def test_parameters_of_the_wrong_kind(parameters: dict[str, Any], message: str) -> None:
    async with serving(SmallService(EchoModel())) as running:
        refused = running.stub.ModelInfer(infer_request("echo", 1, parameters=parameters))
        assert await failure(refused) == (INVALID, message)


async def test_parameters_of_a_response() -> None:
    parameters: Parameters = {"flag": True, "count": 2**63, "less": -1, "text": "é", "ratio": 0.5}
    model = FunctionModel("echo", lambda job: job.respond(InferResponse([], parameters)))
    async with serving(SmallService(model)) as running:
        response = await running.stub.ModelInfer(infer_request("echo", 1))
    kinds = {name: each.WhichOneof("parameter_choice") for name, each in response.parameters.items()}
    assert {name: getattr(response.parameters[name], kind) for name, kind in kinds.items()} == parameters
    assert (kinds["count"], kinds["less"], kinds["ratio"]) == ("uint64_param", "int64_param", "double_param")


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


# --- ensembles whose language model streams only on request ---


class OnRequest(ensembles.FunctionModel):
    """A model that is decoupled like an LLM: for requests that say so."""

    def is_decoupled_for(self, request: InferRequest) -> bool:
        return bool(request.parameters.get("stream", False))


TALK = (
    'name: "talk" backend: "test" input { name: "X" data_type: TYPE_INT32 dims: -1 } '
    'output { name: "Y" data_type: TYPE_INT32 dims: -1 } model_transaction_policy { decoupled: true }'
)
ONLY_STREAMS = ("UNIMPLEMENTED", "ModelInfer RPC doesn't support models with decoupled transaction policy")


async def pipeline(talk: OnRequest) -> EnsembleModel:
    config = ensembles.ensemble_config("talk: X=query -> Y=response", inputs="", outputs="")
    for tensor, name in ((config.input.add(), "query"), (config.output.add(), "response")):
        tensor.name, tensor.data_type = name, 8
        tensor.dims.append(-1)
    return await ensembles.load(config, Lookup(talk))


async def test_strings_are_answered() -> None:
    strings = service_pb2.ModelInferRequest(model_name="strings")
    add_input(strings, "BYTES", [1], b"\x01\0\0\0a")
    async with serving(SmallService(EchoModel("strings", "BYTES"))) as running:
        assert (await running.stub.ModelInfer(strings)).raw_output_contents == [b"\x01\0\0\0a"]


async def test_a_unary_call_gets_one_response_and_cannot_stream() -> None:
    talk = OnRequest(ensembles.config_of(TALK), lambda X: {"Y": X + 1})
    async with serving(SmallService(await pipeline(talk), EchoModel(is_decoupled=True))) as running:
        request = infer_request("whole", 1, 2)
        request.inputs[0].name = "query"
        response = await running.stub.ModelInfer(request)
        assert np.frombuffer(response.raw_output_contents[0], np.int32).tolist() == [2, 3]
        set_parameters(request.parameters, {"stream": True})
        assert await failure(running.stub.ModelInfer(request)) == ONLY_STREAMS
        wrong_too = infer_request("echo", 1, outputs=["NOPE"], parameters={"priority": "no number"})
        assert await failure(running.stub.ModelInfer(wrong_too)) == ONLY_STREAMS
    assert len(talk.requests) == 1
