"""An LLM as a model: its life, its jobs, what is measured. Over a real executor whose runner has no model."""

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.services import RequestLimits
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.sampling import SamplingDefaults
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import SamplingOverrides, TextRequest
from sluice.serving.job import InferJob
from sluice.serving.model import infer_one
from sluice.serving.request import InferResponse
from tests.engine.in_process_client import InProcessEngineClient
from tests.pipelines.llm.calls import Record, ask, request, responses
from tests.pipelines.llm.stepped_runner import SteppedRunner
from tests.pulled import pulled
from tests.serving.backends.builders import infer_stream
from tests.waiting import PATIENCE_S, until

LONG = {"text_input": "hello", "max_tokens": 400, "ignore_eos": True}


async def until_free(engine: InProcessEngineClient, model: LlmModel) -> None:
    """Wait until no blocks are in use: a small request ends after what was cancelled before it."""
    await ask(model, {"text_input": "x", "max_tokens": 1})
    assert (engine.stats.num_running, engine.stats.num_waiting, engine.stats.num_blocks_used) == (0, 0, 0)


def submit(model: LlmModel, fields: dict[str, Any], **settings: Any) -> tuple[InferJob, list[InferResponse]]:
    received: list[InferResponse] = []
    return model.submit(request(model, fields, **settings), received.append), received


async def idle(model: LlmModel) -> None:
    async with asyncio.timeout(PATIENCE_S):
        await model.wait_idle()


@pytest.mark.parametrize("streams", [True, False])
async def test_cancelling_frees_the_blocks(
    model: LlmModel, engine: InProcessEngineClient, runner: SteppedRunner, streams: bool, records: list[Record]
) -> None:
    job, received = submit(model, LONG | {"stream": streams})
    await until(lambda: bool(records and records[0].events))
    runner.hold()
    job.cancel()
    num_received = len(received)
    await idle(model)
    num_runs = runner.num_runs
    runner.release()
    await until_free(engine, model)
    assert runner.num_runs - num_runs <= 3
    assert len(received) == num_received
    assert job.outcome is not None
    assert job.outcome.code is ErrorCode.CANCELLED
    assert records[0].is_closed


async def test_cancelling_before_it_began_ends_it(model: LlmModel, records: list[Record]) -> None:
    job, received = submit(model, LONG)
    job.cancel()
    await idle(model)
    assert (received, records, job.is_finished) == ([], [], True)


async def test_a_batch_that_is_cancelled_frees_every_row(batched: LlmModel, engine: InProcessEngineClient) -> None:
    fields = {
        "text_input": np.array([[b"a"], [b"b"], [b"c"]], np.object_),
        "max_tokens": np.full((3, 1), 200, np.int32),
        "ignore_eos": np.full((3, 1), True),
    }
    job, _ = submit(batched, fields)
    await until(lambda: engine.stats.num_running == 3)
    job.cancel()
    await idle(batched)
    await until_free(engine, batched)


async def test_a_deadline_ends_it(model: LlmModel, runner: SteppedRunner) -> None:
    runner.hold()
    sent = request(model, LONG, timeout_us=50_000)
    with pytest.raises(SluiceError, match=r"0\.05 s") as caught:
        await infer_one(model, sent)
    assert caught.value.code is ErrorCode.DEADLINE


@pytest.mark.parametrize(("parameter", "told_us"), [(9_000_000, 0), (5, 9_000_000)])
async def test_what_the_request_says_of_its_treatment_reaches_the_engine(
    model: LlmModel, engine: InProcessEngineClient, runner: SteppedRunner, parameter: int, told_us: int
) -> None:
    runner.hold()
    times = {"timeout_us": 60_000_000, "queue_timeout_us": told_us}
    parameters = {"cache_salt": "salt", "queue_timeout": parameter}
    job, _ = submit(model, LONG, priority=3, tenant="ada", parameters=parameters, id="r9", **times)
    await until(lambda: bool(engine._streams))
    assert model.statistics.count_pending() == 1
    (stream,) = engine._streams.values()
    sent = stream.request
    assert (sent.request_id, sent.priority, sent.tenant, sent.cache_salt) == ("r9", 3, "ada", "salt")
    assert (sent.timeout_s, sent.queue_timeout_s) == (60.0, 9.0)
    runner.release()
    job.cancel()
    await idle(model)


async def test_the_server_s_limits_hold_for_requests_that_name_none(
    model: LlmModel, engine: InProcessEngineClient, runner: SteppedRunner
) -> None:
    limits = RequestLimits(timeout_s=30.0, queue_timeout_s=7.0)
    limited = LlmModel(model.config, model.text, engine, limits=limits)
    runner.hold()
    jobs = [submit(limited, LONG)[0], submit(limited, LONG, timeout_us=2_000_000)[0]]
    await until(lambda: len(engine._streams) == 2)
    sent = sorted(stream.request.timeout_s or 0 for stream in engine._streams.values())
    assert sent == [2.0, 30.0]
    assert {stream.request.queue_timeout_s for stream in engine._streams.values()} == {7.0}
    runner.release()
    for job in jobs:
        job.cancel()
    await idle(limited)


async def test_every_event_is_recorded(model: LlmModel, records: list[Record]) -> None:
    sent = request(model, {"text_input": "hello", "max_tokens": 7, "stream": True}, protocol="v2_grpc")
    parts = [part async for part in infer_stream(model, sent)]
    (record,) = records
    assert (record.model, record.protocol, record.error, record.is_closed) == ("echo", "v2_grpc", None, True)
    assert len(record.events) == len(parts)
    assert sum(event.num_tokens for event in record.events) == 7


async def test_statistics(model: LlmModel) -> None:
    await ask(model, {"text_input": "hello", "max_tokens": 3})
    parts = [part async for part in responses(model, {"text_input": "hello", "max_tokens": 3, "stream": True})]
    statistics = model.statistics
    assert (statistics.inference_count, statistics.execution_count) == (2, 2)
    infer = statistics.infer
    assert infer.success.count == infer.queue.count == infer.compute_infer.count == 2
    assert infer.queue.ns + infer.compute_infer.ns <= infer.success.ns
    assert 0 < infer.queue.ns < infer.success.ns
    assert statistics.responses[0].success.count == 2
    assert len(statistics.responses) == len(parts)
    with pytest.raises(SluiceError):
        await ask(model, {"text_input": "hello", "max_tokens": 0})
    assert infer.fail.count == 1


async def test_it_is_ready_while_its_engine_is(model: LlmModel, engine: InProcessEngineClient) -> None:
    assert model.is_ready
    engine.is_restarting = True
    assert not model.is_ready
    assert not model.is_lost
    engine.is_restarting = False
    engine._last_report -= 11
    assert not model.is_ready
    await ask(model, {"text_input": "hello", "max_tokens": 1})
    assert model.is_ready
    engine._die("the engine is gone")
    assert not model.is_ready
    assert model.is_lost
    with pytest.raises(SluiceError, match="the engine is gone"):
        await ask(model, {"text_input": "hello"})


async def test_closing_ends_what_is_under_way(model: LlmModel, runner: SteppedRunner) -> None:
    parts = responses(model, LONG | {"stream": True})
    await anext(parts)
    await model.close()
    last = [part async for part in parts][-1]
    assert last.error is not None
    assert last.error.code is ErrorCode.UNAVAILABLE
    assert not model.is_ready
    await model.close()
    assert runner.is_closed


async def test_unloading_lets_it_end(model: LlmModel) -> None:
    answer = asyncio.create_task(ask(model, {"text_input": "hello", "max_tokens": 20}))
    await asyncio.sleep(0)
    await model.unload(PATIENCE_S)
    assert (await answer)["finish_reason"] == "length"
    with pytest.raises(SluiceError, match="model 'echo' version 1 is being unloaded"):
        await ask(model, {"text_input": "hello"})


async def test_unloading_waits_for_requests_of_the_openai_routes(model: LlmModel, runner: SteppedRunner) -> None:
    sampling = SamplingOverrides(max_tokens=4, temperature=0.0)
    sent = TextRequest(request_id="direct", prompt=[1, 2, 3], sampling=sampling)
    async with aclosing(pulled(model.text.generate, sent)) as events:
        tokens = (await anext(events)).num_tokens
        unloading = asyncio.ensure_future(model.unload(timeout_s=30))
        assert not model.is_idle
        async for event in events:
            tokens += event.num_tokens
            assert not unloading.done()
    assert tokens == 4
    await unloading
    assert model.is_idle


async def test_the_trial_needs_no_text_that_the_tokenizer_can_encode(
    engine: InProcessEngineClient, rill: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def encode_text(text: str) -> list[int]:
        raise SluiceError(ErrorCode.INVALID, f"cannot encode {text!r}")

    text = LlmText("echo", rill, engine, SamplingDefaults(), created=1)
    monkeypatch.setattr(rill, "encode_text", encode_text)
    await text.warm_up()
