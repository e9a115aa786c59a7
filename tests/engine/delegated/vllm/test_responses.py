"""vLLM's responses and exceptions."""

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.engine.delegated.interface import ResponseDelta
from sluice.engine.delegated.vllm.responses import VllmRequestHandle, classify
from sluice.engine.delegated.vllm.statistics import StatisticsReader
from sluice.engine.types import EventDetail, FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from sluice.errors import ErrorCode, SluiceError


async def nothing() -> AsyncIterator[Any]:
    return
    yield


def handle(**sampling: Any) -> VllmRequestHandle:
    request = GenerateRequest(request_id="1", prompt_token_ids=[1, 2], sampling=SamplingParams(**sampling))

    async def abort() -> None:
        pass

    return VllmRequestHandle(nothing(), request, abort)


def output(
    *ids: int, reason: str | None = None, cached: int | None = None, logprobs: Any = None, prompt: Any = None
) -> SimpleNamespace:
    part = SimpleNamespace(token_ids=ids, finish_reason=reason, logprobs=logprobs)
    return SimpleNamespace(
        outputs=[part], finished=reason is not None, num_cached_tokens=cached, prompt_logprobs=prompt
    )


def logprob(**by_id: float) -> dict[int, Any]:
    return {int(name[1:]): SimpleNamespace(logprob=value) for name, value in by_id.items()}


def test_outputs_hold_what_is_new() -> None:
    reader = handle()
    assert reader.read(output(5, cached=1)) == ResponseDelta([5], None, EventDetail(1))
    assert reader.read(output(6, 7, cached=1)) == ResponseDelta([6, 7])
    assert not reader.is_finished
    assert reader.read(output(8, reason="stop")) == ResponseDelta([8], FinishReason.STOP)
    assert reader.is_finished


@pytest.mark.parametrize(("word", "reason"), [("length", FinishReason.LENGTH), ("abort", FinishReason.CANCELLED)])
def test_finish_reasons(word: str, reason: FinishReason) -> None:
    assert handle().read(output(reason=word)).finish_reason is reason


def test_an_end_without_meaning_is_an_error() -> None:
    with pytest.raises(SluiceError, match="'repetition'"):
        handle().read(output(reason="repetition"))


def test_log_probabilities() -> None:
    reader = handle(logprobs=1, prompt_logprobs=1)
    entry, prompt = logprob(t5=-2.0, t9=-0.5), [None, logprob(t2=-1.0, t3=-0.25)]
    detail = reader.read(output(5, cached=0, logprobs=[entry], prompt=prompt)).detail
    assert detail == EventDetail(0, [TokenLogprob(5, -2.0, [(9, -0.5)])], [None, TokenLogprob(2, -1.0, [(3, -0.25)])])
    assert reader.read(output(6, cached=0, logprobs=[logprob(t6=-1.0)], prompt=prompt)).detail == EventDetail(
        None, [TokenLogprob(6, -1.0, [(6, -1.0)])]
    )


class VLLMValidationError(ValueError):
    """As vLLM's."""

    def __init__(self, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.parameter = parameter


class EngineDeadError(Exception):
    """As vLLM's."""


def test_what_vllm_refuses_is_the_clients() -> None:
    failure = classify(VLLMValidationError("too many", "logprobs"))
    assert (failure.error.code, failure.error.param, failure.is_fatal) == (ErrorCode.INVALID, "logprobs", False)
    assert failure.error.message == "vLLM refuses the request: too many"
    failure = classify(VLLMValidationError("Grammar error: Invalid type: objec"))
    assert failure.error.message == 'the grammar cannot be used: there is no type "objec"'
    assert failure.error.param == "grammar"


def test_what_ends_the_engine() -> None:
    assert classify(EngineDeadError()).is_fatal
    failure = classify(RuntimeError("shutting down"))
    assert (failure.is_fatal, failure.error.code) == (False, ErrorCode.INTERNAL)


def test_steps_are_told() -> None:
    taken: list[Any] = []
    reader = StatisticsReader()
    reader.num_blocks = 10
    reader._on_iteration = taken.append
    step = reader.logger_class(object)(None, [0])
    details = SimpleNamespace(
        iteration_index=3, num_ctx_requests=1, num_ctx_tokens=20, num_generation_requests=2, elapsed_ms=5.0,
        is_dummy=False,
    )  # fmt: skip
    scheduler = SimpleNamespace(
        num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.4, iteration_details=details, spec_decoding_stats=None
    )
    step.record(scheduler, SimpleNamespace(num_preempted_reqs=2))
    step.record(None, None)
    [iteration] = taken
    stats = iteration.stats
    assert (stats.iteration, stats.num_context, stats.num_generation, stats.context_tokens) == (3, 1, 2, 20)
    assert (stats.used_blocks, stats.free_blocks, stats.num_paused, iteration.seconds) == (4, 6, 2, 0.005)
