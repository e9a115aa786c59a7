"""min_tokens where several tokens can end the output: two requests of TensorRT-LLM, one of the client's."""

import json
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.engine.delegated.interface import ResponseDelta
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.responses import TwoPartHandle, first_part
from sluice.engine.model_folder import ModelFormat
from sluice.engine.types import FinishReason, GenerateRequest, Grammar, GrammarKind, SamplingParams
from tests.engine.delegated.tensorrt_llm.flavours import FLAVOURS
from tests.engine.delegated.tensorrt_llm.over_stand_in import (
    StandIn,
    answer,
    echo,
    request,
    running,
    tokens,
    until_idle,
)
from tests.errors import error_of

HEARTBEAT_S = 25.0
"""The library imports torch when it is imported; over the stand-in the first bias does, on the event loop."""


def divided(*, ends: tuple[int, ...] = (2, 3), resumed: int = 0, **sampling: Any) -> SamplingParams | None:
    folder = LlmFolder(Path("/model"), ModelFormat.HUGGINGFACE, "llama", "bfloat16", 16, ends, 64)
    asked = GenerateRequest(
        request_id="r",
        prompt_token_ids=[5],
        sampling=SamplingParams(max_tokens=9, **sampling),
        resume_token_ids=[7] * resumed,
    )
    first = first_part(asked, folder)
    return None if first is None else first.sampling


def test_until_the_fewest_tokens_every_end_is_banned() -> None:
    first = divided(min_tokens=4, stop_token_ids=(9,), logit_bias={1: 2.0})
    assert first is not None
    assert (first.max_tokens, first.min_tokens, first.ignore_eos, first.stop_token_ids) == (4, 0, True, ())
    assert first.logit_bias == {1: 2.0, 2: -math.inf, 3: -math.inf, 9: -math.inf}


def test_ends_that_the_vocabulary_has_not_are_left_out() -> None:
    first = divided(min_tokens=4, ends=(2, 3, 16))
    assert first is not None and first.logit_bias == {2: -math.inf, 3: -math.inf}


@pytest.mark.parametrize(
    "asked",
    [
        {"min_tokens": 4, "ends": (2,)},
        {"min_tokens": 0},
        {"min_tokens": 4, "resumed": 4},
        {"min_tokens": 4, "ignore_eos": True},
        {"min_tokens": 4, "ends": (2,), "stop_token_ids": (2,)},
    ],
)
def test_what_needs_no_division(asked: dict[str, Any]) -> None:
    assert divided(**asked) is None


@pytest.mark.parametrize("asked", [{"beam_width": 2}, {"grammar": Grammar(GrammarKind.REGEX, "a")}])
def test_what_cannot_be_divided_is_refused(asked: dict[str, Any]) -> None:
    error = error_of(divided, min_tokens=4, **asked)
    assert error.param == "min_tokens" and "where several tokens can end the output, got 4" in error.message


@pytest.mark.parametrize(
    "asked",
    [
        {"min_tokens": 4, "allowed_token_ids": (2, 3)},
        {"min_tokens": 4, "ends": (2,), "allowed_token_ids": (2,)},
        {"min_tokens": 4, "allowed_token_ids": (2, 9), "bad_words": ((9,), (1, 2))},
        {"allowed_token_ids": (9,), "bad_words": ((9,),)},
    ],
)
def test_a_request_that_leaves_no_token_is_refused(asked: dict[str, Any]) -> None:
    error = error_of(divided, **asked)
    assert error.param == "allowed_token_ids" and "must leave a token to choose" in error.message


class Part:
    """A request that brings these tokens, piece by piece, and then its length is reached."""

    is_finished = False

    def __init__(self, *pieces: list[int]) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        for number, piece in enumerate(self._pieces, 1):
            self.is_finished = number == len(self._pieces)
            yield piece

    def read(self, response: list[int]) -> ResponseDelta:
        return ResponseDelta(response, FinishReason.LENGTH if self.is_finished else None)


async def test_the_second_part_goes_on_from_all_that_the_first_has_brought() -> None:
    whole = msgspec.structs.replace(request([5], 9, min_tokens=4), resume_token_ids=[7])
    rest: list[list[int]] = []

    def submit_rest(asked: GenerateRequest) -> Part:
        rest.append(asked.resume_token_ids)
        return Part([4, 5])

    handle = TwoPartHandle(Part([1], [2, 3]), whole, submit_rest)  # type: ignore[arg-type]
    deltas = [handle.read(response) async for response in handle]
    assert [each.token_ids for each in deltas] == [[1], [2, 3], [4, 5]]
    assert [each.finish_reason for each in deltas] == [None, None, FinishReason.LENGTH]
    assert (rest, handle.is_finished) == ([[7, 1, 2, 3]], True)


@pytest.fixture(params=FLAVOURS)
def stand_in(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> StandIn:
    return StandIn(monkeypatch, tmp_path, request.param)


async def test_no_stop_token_ends_an_answer_too_early(stand_in: StandIn, tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"1,2,3": [40, 50, 40, 60, 50, 70]}))
    stand_in.set(SCRIPT=script)
    async with stand_in.client(HEARTBEAT_S) as client:
        early = await answer(client.submit(request([1, 2, 3], stop_token_ids=(50,))))
        late = await answer(client.submit(request([1, 2, 3], stop_token_ids=(50,), min_tokens=4, logprobs=1)))
        whole = await answer(client.submit(request([1, 2, 3], 4, stop_token_ids=(60,), min_tokens=4)))
        await until_idle(client)
        assert client.stats.generation_tokens_total == 2 + 5 + 4
        assert client.stats.prompt_tokens_total + client.stats.cached_tokens_total == 3 * 3
    assert early.token_ids == [40, 50]
    assert late.token_ids[0] == 40 and late.token_ids[1] != 50 and late.token_ids[2:] == [40, 60, 50]
    assert (late.reason, [each.token_id for each in late.logprobs]) == (FinishReason.STOP, late.token_ids)
    assert len(whole.token_ids) == 4 and 60 not in whole.token_ids and whole.reason is FinishReason.LENGTH


async def test_either_part_can_be_cancelled(stand_in: StandIn) -> None:
    stand_in.set(STEP_MS=2)
    async with stand_in.client(HEARTBEAT_S, max_num_seqs=1) as client:
        for num_tokens in (5, 60):
            asked = request([5], 900, stop_token_ids=(4095,), min_tokens=40)
            stream = await running(client, asked, num_tokens)
            stream.cancel()
            await until_idle(client)
        assert await tokens(client.submit(request([7], 5))) == echo([7], 5)
