import asyncio
import gc
import weakref
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.grpc import stream as stream_module
from sluice.gateway.api.v2.trace_settings import TraceSettings
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from sluice.serving.tensors.tensor import Tensor
from tests.gateway.api.v2.grpc.parts import (
    EchoModel,
    FunctionModel,
    HeldModel,
    Running,
    infer_request,
    on_both_servers,
    serving,
    set_parameters,
)
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import until

pytestmark = on_both_servers
WANTS_END = {"triton_enable_empty_final_response": True}


def said(message: Any) -> tuple[Any, ...]:
    """Return id, values or error, and whether the message is final (None: it does not say)."""
    response = message.infer_response
    final = response.parameters["triton_final_response"].bool_param if response.parameters else None
    if message.error_message:
        return response.id, message.error_message, final
    values = np.frombuffer(response.raw_output_contents[0], np.int32).tolist() if response.outputs else None
    return response.id, values, final


async def ask(running: Running, *requests: Any) -> list[tuple[Any, ...]]:
    """Return every message that one stream answers to `requests`."""
    return [said(message) async for message in running.stub.ModelStreamInfer(iter(requests))]


async def heard(call: Any, count: int) -> list[tuple[Any, ...]]:
    return [said(await call.read()) for _ in range(count)]


def count_to(job: InferJob) -> None:
    """Sends as many responses as INPUT0 says; a negative number fails in the middle."""
    wanted = int(job.request.inputs["INPUT0"].array[0])
    for number in range(abs(wanted)):
        if wanted < 0 and number == 1:
            error = SluiceError(ErrorCode.INTERNAL, "asked to fail")
            job.respond(InferResponse(error=error, is_final=False))
        else:
            job.respond(InferResponse([Tensor.of("OUTPUT0", np.array([number], np.int32))], is_final=False))
    job.respond(InferResponse())


def counting() -> FunctionModel:
    return FunctionModel("count", count_to, is_decoupled=True)


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (infer_request("count", 3, id="s"), [("s", [0], False), ("s", [1], False), ("s", [2], False)]),
        (infer_request("count", 1, id="s", parameters=WANTS_END), [("s", [0], False), ("s", None, True)]),
        (infer_request("count", 0, id="s"), []),
        (infer_request("count", 0, id="s", parameters=WANTS_END), [("s", None, True)]),
        (infer_request("count", -3, id="e"), [("e", [0], False), ("e", "asked to fail", False), ("e", [2], False)]),
        (infer_request("empty", 1, id="n"), [("n", None, True)]),
        (infer_request("echo", 1, id="a"), [("a", [1], True)]),
        (None, []),
    ],
)
async def test_the_messages_of_a_request(request_: Any, expected: list[tuple[Any, ...]]) -> None:
    empty = FunctionModel("empty", lambda job: job.respond(InferResponse()))
    async with serving(SmallService(counting(), empty, EchoModel())) as running:
        requests = [] if request_ is None else [request_]
        messages = [each async for each in running.stub.ModelStreamInfer(iter(requests))]
    assert [said(each) for each in messages] == expected
    for message in messages:
        response = message.infer_response
        is_named = bool(response.outputs) or response.model_name == "empty"
        assert (response.model_name, response.model_version) == (requests[0].model_name, "1" if is_named else "")


async def test_errors_are_messages_and_the_stream_goes_on() -> None:
    wrong = infer_request("echo", 1, id="c")
    wrong.raw_input_contents[0] = b""
    requests = [infer_request("nope", 1, id="a"), infer_request("echo", 2, id="b"), wrong, infer_request("nope", 1)]
    async with serving(SmallService(EchoModel())) as running:
        assert await ask(running, *requests) == [
            ("a", "Request for unknown model: 'nope' is not found", None),
            ("b", [2], True),
            (
                "c",
                "[request id: c] input byte size mismatch for input 'INPUT0' for model 'echo'. Expected 4, got 0",
                None,
            ),
            ("", "Request for unknown model: 'nope' is not found", None),
        ]
        messages = [each async for each in running.stub.ModelStreamInfer(iter([requests[0]]))]
        assert messages[0].HasField("infer_response") and not messages[0].infer_response.model_name


async def test_an_output_that_cannot_be_given_as_asked() -> None:
    request = infer_request("echo", 1, id="c", outputs=["OUTPUT0"])
    set_parameters(request.outputs[0].parameters, {"classification": 1})
    request.inputs[0].datatype = "FP16"
    request.raw_input_contents[0] = b"\0\0"
    async with serving(SmallService(EchoModel(datatype="FP16"))) as running:
        [(request_id, text, final)] = await ask(running, request)
    assert (request_id, final) == ("c", True)
    assert text == "class result not available for output due to unsupported type 'FP16'"


async def test_responses_of_models_that_are_not_decoupled_keep_their_order() -> None:
    model = HeldModel()
    async with serving(SmallService(model, EchoModel())) as running:
        call = running.stub.ModelStreamInfer()
        for request in (
            infer_request("held", 1, id="slow"),
            infer_request("nope", 1, id="wrong"),
            infer_request("echo", 2, id="fast"),
            infer_request("held", 3, id="last"),
        ):
            await call.write(request)
        await model.until(lambda: len(model.jobs) == 2)
        model.send("last", 3, is_final=True)
        model.send("slow", 1, is_final=True)
        assert [each[0] for each in await heard(call, 4)] == ["slow", "wrong", "fast", "last"]
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_decoupled_responses_do_not_wait() -> None:
    held, streamed = HeldModel(), HeldModel("streamed", is_decoupled=True)
    async with serving(SmallService(held, streamed)) as running:
        call = running.stub.ModelStreamInfer()
        await call.write(infer_request("held", 1, id="slow"))
        for request_id in ("x", "y"):
            await call.write(infer_request("streamed", 1, id=request_id, parameters=WANTS_END))
        await streamed.until(lambda: len(streamed.jobs) == 2)
        streamed.send("y", 1)
        streamed.send("x", 2)
        streamed.send("y", is_final=True)
        assert await heard(call, 3) == [("y", [1], False), ("x", [2], False), ("y", None, True)]
        held.send("slow", 7, is_final=True)
        streamed.send("x", is_final=True)
        assert await heard(call, 2) == [("slow", [7], True), ("x", None, True)]


async def test_cancelling_a_stream_cancels_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, decoupled, ended = HeldModel(), HeldModel("streamed", is_decoupled=True), set[Any]()
    monkeypatch.setattr(stream_module._Slot, "end", lambda slot: ended.add(slot))
    monkeypatch.setattr(stream_module, "is_short", lambda response, plan: not response.is_final)
    monkeypatch.setattr(stream_module, "run_aside", lambda work: asyncio.Event().wait())
    async with serving(SmallService(plain, decoupled)) as running:
        call = running.stub.ModelStreamInfer()
        await call.write(infer_request("held", 1, id="a"))
        await call.write(infer_request("held", 1, id="b"))
        await call.write(infer_request("streamed", 1, id="c"))
        await call.write(infer_request("streamed", 1, id="long"))
        await decoupled.until(lambda: len(decoupled.jobs) == 2)
        decoupled.send("c", 1)
        decoupled.send("long", 1, is_final=True)
        call.cancel()
        await plain.until(lambda: sorted(plain.cancelled) == ["a", "b"])
        await decoupled.until(lambda: decoupled.cancelled == ["c"])
        assert plain.num_in_flight == decoupled.num_in_flight == 0
        await until(lambda: len(ended) == 4)


async def test_a_deadline_cancels_all_of_it() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelStreamInfer(iter([infer_request("held", 1, id="a")]), timeout=0.1)
        assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await model.until(model.has_cancelled_all)
        await until(lambda: model.num_in_flight == 0)


async def test_a_malformed_message_ends_the_stream_after_what_was_asked() -> None:
    async with serving(SmallService(EchoModel())) as running:
        call = running.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        await call.write(infer_request("echo", 1).SerializeToString())
        await call.write(b"\xff\xff\xff")
        assert await call.read()
        with pytest.raises(grpc.RpcError) as caught:
            await call.read()
        assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.INTERNAL, "Unable to parse request")


async def test_requests_wait_while_too_many_are_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_IN_FLIGHT", 4)
    model = HeldModel()
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelStreamInfer()
        for number in range(10):
            await call.write(infer_request("held", number, id=str(number)))
        await call.done_writing()
        await model.until(lambda: len(model.jobs) == 4)
        for number in (3, 2, 1):
            model.send(str(number), number, is_final=True)
        assert len(model.jobs) == 4, "answers that wait for an earlier one count too"
        model.send("0", 0, is_final=True)
        for number in range(4, 10):
            await model.until(lambda number=number: len(model.jobs) > number)  # type: ignore[misc]
            model.send(str(number), number, is_final=True)
        assert [each[0] for each in await heard(call, 10)] == [str(number) for number in range(10)]


async def test_a_reader_that_falls_far_behind_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNREAD", 100)
    model = HeldModel(is_decoupled=True)
    async with serving(SmallService(model)) as running:
        call = running.stub.ModelStreamInfer()
        await call.write(infer_request("held", 1, id="slow"))
        await model.until(lambda: len(model.jobs) == 1)
        sent: list[weakref.ref[Any]] = []
        for _ in range(300):
            outputs = [Tensor.of("OUTPUT0", np.zeros(25_000, np.int32))]
            sent.append(weakref.ref(outputs[0].array))
            model.jobs[0].respond(InferResponse(outputs, is_final=False))
            del outputs
        await model.until(lambda: model.cancelled == ["slow"])
        gc.collect()
        assert sum(each() is not None for each in sent) < 20, "what it will not read any more is forgotten"
        with pytest.raises(grpc.RpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert caught.value.details() == "the client fell 100 responses behind"


@pytest.mark.parametrize("is_decoupled", [True, False])
async def test_a_model_that_answers_too_much_at_once(monkeypatch: pytest.MonkeyPatch, is_decoupled: bool) -> None:
    monkeypatch.setattr(stream_module, "MAX_UNREAD", 100)
    jobs: list[InferJob] = []

    def flood(job: InferJob) -> None:
        jobs.append(job)
        for _ in range(250):
            job.respond(InferResponse([job.request.inputs["INPUT0"].renamed("OUTPUT0")], is_final=False))

    async with serving(SmallService(FunctionModel("flood", flood, is_decoupled=is_decoupled))) as running:
        with pytest.raises(grpc.RpcError) as caught:
            await ask(running, infer_request("flood", 1))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert jobs[0].is_cancelled


async def test_many_streams_lose_nothing() -> None:
    async with serving(SmallService(counting())) as running:

        async def stream(number: int) -> int:
            return len(await ask(running, infer_request("count", 16, id=str(number))))

        assert await asyncio.gather(*map(stream, range(100))) == [16] * 100


async def test_traced_requests(tmp_path: Path) -> None:
    model = HeldModel(is_decoupled=True)
    service = SmallService(model, EchoModel())
    service.trace = TraceSettings(str(tmp_path / "trace.json"))
    service.trace.update({"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "3"})
    async with serving(service) as running:
        call = running.stub.ModelStreamInfer()
        for request in (infer_request("echo", 1, id="plain"), infer_request("held", 1, id="many")):
            await call.write(request)
        await model.until(lambda: len(model.jobs) == 1)
        model.send("many", 1)
        model.send("many", 2, is_final=True)
        await heard(call, 3)
        await call.write(infer_request("held", 1, id="left"))
        await model.until(lambda: len(model.jobs) == 2)
        call.cancel()
        await model.until(lambda: model.cancelled == ["left"])
    text = (tmp_path / "trace.json.0").read_text()
    assert all(text.count(f'"request_id":"{each}"') == 1 for each in ("plain", "many", "left"))
    assert text.count('"INFER_RESPONSE_COMPLETE"') == 3
    assert text.count('"REQUEST_END"') == 2


async def test_answered_requests_are_freed_at_once() -> None:
    """Objects of a stream are freed without the garbage collector, which many messages would keep busy."""
    model = HeldModel(is_decoupled=True)
    async with serving(SmallService(model, EchoModel())) as running:
        call = running.stub.ModelStreamInfer()
        gc.disable()
        try:
            await call.write(infer_request("held", 1, id="a"))
            await model.until(lambda: len(model.jobs) == 1)
            freed = weakref.ref(model.jobs[0].request.inputs["INPUT0"].array)
            model.send("a", 1, is_final=True)
            model.jobs.clear()
            await heard(call, 1)
            await call.write(infer_request("echo", 1))  # the writer has let go of what it wrote when it writes again
            await heard(call, 1)
            assert freed() is None
        finally:
            gc.enable()
