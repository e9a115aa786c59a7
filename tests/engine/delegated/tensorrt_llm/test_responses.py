"""Every form of a RequestOutput, without an LLM."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.engine.delegated.tensorrt_llm.responses import LlmRequestHandle, read_prompt_logprobs
from sluice.engine.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob
from sluice.errors import ErrorCode, SluiceError

ENDS = (2, 3)
BLOCK_SIZE = 4


@dataclass
class Completion:
    token_ids: list[int] = field(default_factory=list)
    logprobs: Any = None
    prompt_logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    request_perf_metrics: Any = None


@dataclass
class Output:
    outputs: list[Completion] = field(default_factory=lambda: [Completion()])


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


def reader(**sampling: Any) -> LlmRequestHandle:
    request = GenerateRequest(request_id="r", prompt_token_ids=[10, 11, 12], sampling=SamplingParams(**sampling))
    return LlmRequestHandle(None, request, ENDS, BLOCK_SIZE)


def test_one_object_that_grows_is_read_piece_by_piece() -> None:
    output, reads = Output(), reader()
    best = output.outputs[0]
    got = []
    for step in ([5], [5, 6, 7], [5, 6, 7], [5, 6, 7, 8]):
        best.token_ids = step
        got.append(reads.read(output).token_ids)
    assert got == [[5], [6, 7], [], [8]]
    best.finish_reason = "length"
    delta = reads.read(output)
    assert (delta.token_ids, delta.finish_reason) == ([], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("token_ids", "stop_reason", "whole"),
    [
        ([5, 2], None, [5, 2]),
        ([5], None, [5, 2]),
        ([5], 3, [5, 3]),
        ([5], 50, [5, 50]),
        ([5, 50], 50, [5, 50]),
        ([], None, [2]),
    ],
)
def test_the_token_that_ended_it_is_the_last(token_ids: list[int], stop_reason: int | None, whole: list[int]) -> None:
    output = Output([Completion(token_ids, finish_reason="stop", stop_reason=stop_reason)])
    delta = reader(stop_token_ids=(50,)).read(output)
    assert (delta.token_ids, delta.finish_reason) == (whole, FinishReason.STOP)


@pytest.mark.parametrize(
    ("last", "sampling", "reason"),
    [
        (50, {"stop_token_ids": (50,)}, FinishReason.STOP),
        (2, {}, FinishReason.STOP),
        (2, {"ignore_eos": True}, FinishReason.LENGTH),
        (6, {"stop_token_ids": (50,)}, FinishReason.LENGTH),
    ],
)
def test_a_stop_token_as_the_last_that_is_allowed_stops(
    last: int, sampling: dict[str, Any], reason: FinishReason
) -> None:
    delta = reader(**sampling).read(Output([Completion([5, last], finish_reason="length")]))
    assert (delta.token_ids, delta.finish_reason) == ([5, last], reason)


def test_an_end_token_that_came_before_the_end_is_not_added_again() -> None:
    output, reads = Output([Completion([5, 2])]), reader()
    assert reads.read(output).token_ids == [5, 2]
    output.outputs[0].finish_reason = "stop"
    assert reads.read(output).token_ids == []


def test_a_version_that_takes_the_stop_token_away_at_the_end() -> None:
    output, reads = Output([Completion([5, 50])]), reader(stop_token_ids=(50,))
    reads.read(output)
    output.outputs[0] = Completion([5], finish_reason="stop", stop_reason=50)
    assert reads.read(output).token_ids == []


@pytest.mark.parametrize(("told", "code"), [("timeout", ErrorCode.DEADLINE), ("not_finished", ErrorCode.INTERNAL)])
def test_ends_that_are_errors(told: str, code: ErrorCode) -> None:
    with pytest.raises(SluiceError) as caught:
        reader().read(Output([Completion([5], finish_reason=told)]))
    assert caught.value.code is code


def test_logprobs_of_both_forms() -> None:
    by_id = [{7: Logprob(-2.0, 5), 1: Logprob(-0.5, 1), 4: Logprob(-1.0, 2)}, {8: -0.25, 1: -3.0}]
    delta = reader(logprobs=2).read(Output([Completion([7, 8], by_id)]))
    assert delta.detail is not None
    assert delta.detail.logprobs == [
        TokenLogprob(7, -2.0, [(1, -0.5), (4, -1.0)]),
        TokenLogprob(8, -0.25, [(8, -0.25), (1, -3.0)]),
    ]
    delta = reader(logprobs=0).read(Output([Completion([7, 8], [-2.0, -0.25])]))
    assert delta.detail is not None
    assert delta.detail.logprobs == [TokenLogprob(7, -2.0), TokenLogprob(8, -0.25)]


def test_logprobs_that_nobody_asked_for_are_not_told() -> None:
    assert reader().read(Output([Completion([7], [-2.0])])).detail is None


PROMPT = [10, 11, 12]


@pytest.mark.parametrize(
    "entries",
    [
        [None, {11: Logprob(-1.0)}, {12: Logprob(-2.0)}],
        [{99: Logprob(-9.0)}, {11: Logprob(-1.0)}, {12: Logprob(-2.0)}],
        [{11: Logprob(-1.0)}, {12: Logprob(-2.0)}],
        [{11: Logprob(-1.0)}, {12: Logprob(-2.0)}, {77: Logprob(-3.0)}],
    ],
)
def test_prompt_logprobs_in_place_or_one_ahead(entries: list[Any]) -> None:
    told = read_prompt_logprobs(PROMPT, entries, 0)
    assert told == [None, TokenLogprob(11, -1.0, []), TokenLogprob(12, -2.0, [])]


def test_prompt_tokens_whose_own_is_not_told_have_none() -> None:
    assert read_prompt_logprobs(PROMPT, [{5: Logprob(-1.0)}, {12: Logprob(-2.0)}, {}], 1) == [
        None,
        None,
        TokenLogprob(12, -2.0, [(12, -2.0)]),
    ]
    assert read_prompt_logprobs(PROMPT, [{11: Logprob(-1.0)}], 0) == [None, TokenLogprob(11, -1.0, []), None]
    assert read_prompt_logprobs([10], [{5: Logprob(-1.0)}], 0) == [None]


def metrics(blocks: int) -> Any:
    return SimpleNamespace(kv_cache_metrics=SimpleNamespace(num_reused_blocks=blocks))


def test_cached_tokens_from_where_they_are() -> None:
    reads, output = reader(), Output([Completion([5])])
    output.cached_tokens = 2  # type: ignore[attr-defined]
    delta = reads.read(output)
    assert delta.detail is not None and delta.detail.num_cached_tokens == 2
    output.outputs[0].finish_reason = "length"
    assert reads.read(output).detail is None
    late, output = reader(), Output([Completion([5], request_perf_metrics=metrics(0))])
    assert late.read(output).detail is None
    output.outputs[0].request_perf_metrics = metrics(3)
    output.outputs[0].finish_reason = "length"
    delta = late.read(output)
    assert delta.detail is not None and delta.detail.num_cached_tokens == len(PROMPT)
