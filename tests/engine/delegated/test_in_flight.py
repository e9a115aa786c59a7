"""Answers that go on after a restart."""

import msgspec
import pytest

from sluice.engine.delegated.interface import ResponseDelta
from sluice.engine.delegated.sequence import ReplayedOutput
from sluice.engine.frames import Submit
from sluice.engine.types import (
    EventDetail,
    FinishReason,
    GenerateRequest,
    Grammar,
    GrammarKind,
    SamplingParams,
    TokenLogprob,
)
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.fake_runtime import FakeHandle, FakeRuntime, make_request, outcomes, running_executor

GRAMMAR = Grammar(GrammarKind.JSON_OBJECT)


def delta(*token_ids: int, num_cached: int | None = None, has_logprobs: bool = True) -> ResponseDelta:
    logprobs = [TokenLogprob(each, -float(each)) for each in token_ids] if has_logprobs else None
    return ResponseDelta(list(token_ids), None, EventDetail(num_cached, logprobs))


def test_what_was_sent_is_dropped_with_its_log_probabilities() -> None:
    replay = ReplayedOutput([5, 6, 7])
    trimmed = [replay.trim(delta(*ids)) for ids in ((5,), (6,), (7, 8), (9,))]
    assert trimmed == [ResponseDelta([]), ResponseDelta([]), delta(8), delta(9)]


def test_other_details_are_kept() -> None:
    assert ReplayedOutput([5]).trim(delta(5, num_cached=3)) == ResponseDelta([], None, EventDetail(3))
    assert ReplayedOutput([5]).trim(ResponseDelta([5], FinishReason.LENGTH)) == ResponseDelta([], FinishReason.LENGTH)


def test_another_turn_is_an_error() -> None:
    with pytest.raises(SluiceError, match="another turn") as caught:
        ReplayedOutput([5, 6, 7]).trim(delta(5, 9))
    assert caught.value.code is ErrorCode.INTERNAL


class AnsweringHandle(FakeHandle):
    """Answers with three tokens at once."""

    def read(self, response: object) -> ResponseDelta:
        return ResponseDelta([5, 6, 7], FinishReason.LENGTH)


async def test_a_runtime_starts_a_replayed_request_from_its_prompt() -> None:
    given: list[GenerateRequest] = []

    def answer(request: GenerateRequest) -> FakeHandle:
        given.append(request)
        return AnsweringHandle()

    params = SamplingParams(max_tokens=3, grammar=GRAMMAR)
    asked = msgspec.structs.replace(make_request(1), sampling=params, resume_token_ids=[5, 6])
    async with running_executor(FakeRuntime(answer)) as (executor, frames):
        executor.obey([Submit(1, asked)])
        ended = (await outcomes(frames, 1))[1]
    assert (given[0].prompt_token_ids, given[0].resume_token_ids) == ([1], [])
    assert ended.token_ids == [7]
