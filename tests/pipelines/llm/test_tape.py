"""Tapes: texts take turns, and what was recorded comes again in the same order before anything new."""

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from sluice.engine.client.stream import Consumer
from sluice.engine.types import EventDetail, FinishReason, TokenEvent
from sluice.pipelines.llm.tape import Tape, TapedGeneration, TextTape
from sluice.pipelines.text.stream import Called, give
from tests.waiting import PATIENCE_S

LENGTHS = (5, 9, 3)


class Engine:
    """Continues texts of consecutive numbers in pieces of its own size, each with the details that the first has."""

    def __init__(self, resumed: Sequence[int], length: int, size: int) -> None:
        self._next = len(resumed)
        self._length = length
        self._size = size
        self._is_stopped = False

    async def pass_to(self, consumer: Consumer[TokenEvent]) -> None:
        for first in range(self._next, self._length, self._size):
            await asyncio.sleep(0)
            if self._is_stopped:
                return
            ids = list(range(first, min(first + self._size, self._length)))
            end = FinishReason.LENGTH if ids[-1] + 1 == self._length else None
            await give(consumer, TokenEvent(1, ids, end, EventDetail(num_cached_tokens=ids[-1] + 1)))

    def stop(self) -> None:
        self._is_stopped = True


async def run(tape: Tape, shown: list[tuple[int, TokenEvent]], most: int | None = None) -> None:
    """Run all texts; each ends where `most` events of them all were shown."""

    async def run_text(number: int) -> None:
        text = TextTape(tape)

        @contextmanager
        def start(resumed: Sequence[int]) -> Iterator[Any]:
            yield Engine(resumed, LENGTHS[number], random.Random(len(resumed) + number).randint(1, 3))

        generation = TapedGeneration(text, start)

        def show(event: TokenEvent) -> None:
            if most is not None and len(shown) == most:
                generation.stop()
            else:
                shown.append((number, event))

        await generation.pass_to(Called(show))

    await asyncio.gather(*(run_text(number) for number in range(len(LENGTHS))))


def note(events: list[tuple[int, TokenEvent]], number: int, event: TokenEvent) -> None:
    events.append((number, event))


async def test_a_tape_is_played_as_it_was_recorded_and_gone_on_with() -> None:
    whole: list[tuple[int, TokenEvent]] = []
    recorded: list[tuple[int, TokenEvent]] = []
    await run(Tape(partial(note, recorded)), whole)
    assert recorded == whole
    for num_kept in range(len(recorded) + 1):
        later: list[tuple[int, TokenEvent]] = []
        shown: list[tuple[int, TokenEvent]] = []
        await run(Tape(partial(note, later), recorded[:num_kept]), shown)
        assert shown[:num_kept] == recorded[:num_kept]
        assert shown[num_kept:] == later
        for number, length in enumerate(LENGTHS):
            assert [i for which, event in shown for i in event.token_ids if which == number] == list(range(length))
        played = {number for number, _ in recorded[:num_kept]}
        for number, event in later:
            assert event.detail is not None
            assert (event.detail.num_cached_tokens is None) == (number in played)


async def test_texts_that_are_given_up_hold_up_nobody() -> None:
    shown: list[tuple[int, TokenEvent]] = []
    async with asyncio.timeout(PATIENCE_S):
        await run(Tape(lambda number, event: None), shown, most=4)
    assert len(shown) == 4
