"""The tokens of a request's texts on tape: recorded as they come, and played before the engine goes on with them.

What is made of the tokens comes again as it was: in the same pieces, and where there are several texts, in the same
order of them all.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import msgspec

from sluice.engine.client.stream import Consumer, GenerationStream
from sluice.engine.types import EventDetail, TokenEvent
from sluice.pipelines.text.stream import Mapped

StartGeneration = Callable[[Sequence[int]], AbstractContextManager[GenerationStream]]
Record = Callable[[int, TokenEvent], None]
"""Receives the number of a text, and its next event before anybody sees it."""


class Tape:
    """The tape of one request. Its texts take turns: one begins when the last event has passed all consumers."""

    def __init__(
        self, record: Record, recorded: Sequence[tuple[int, TokenEvent]] = (), *, goes_on: bool = True
    ) -> None:
        """Play the events `recorded` first, by the numbers of their texts; `record` receives those that follow. Unless
        it `goes_on`, nothing follows, and the engine gets no request."""
        self.record = record
        self.goes_on = goes_on
        self._left = deque(recorded)
        self._num_left: dict[int, int] = {}
        for number, _ in recorded:
            self._num_left[number] = self._num_left.get(number, 0) + 1
        self._num_texts = 0
        self._turn = asyncio.Condition()

    def next_number(self) -> int:
        """Return the number of a text that begins, from 0."""
        self._num_texts += 1
        return self._num_texts - 1

    def is_left(self, number: int) -> bool:
        """Whether events of a text are to be played."""
        return self._num_left.get(number, 0) > 0

    async def play(self, number: int) -> TokenEvent:
        """Begin the turn of the next recorded event, which is the text's, and return it."""
        await self._begin_turn(lambda: self._left[0][0] == number)
        self._num_left[number] -= 1
        return self._left.popleft()[1]

    async def wait_played(self) -> None:
        """Wait until all that is on the tape was played."""
        await self._begin_turn(lambda: not self._left)
        self._turn.release()

    async def _begin_turn(self, is_due: Callable[[], bool]) -> None:
        await self._turn.acquire()
        try:
            await self._turn.wait_for(is_due)
        except BaseException:
            self._turn.release()
            raise

    def end_turn(self) -> None:
        self._turn.notify_all()
        self._turn.release()


current_tape: ContextVar[Tape | None] = ContextVar("current_tape", default=None)
"""The tape of the request that this task works for; None where it has none, as most."""


class TextTape:
    """One text's part of a tape."""

    def __init__(self, tape: Tape) -> None:
        """To be made before anything is awaited for the text: texts are numbered in this order."""
        self.tape = tape
        self.number = tape.next_number()
        self.played_ids: list[int] = []
        """The tokens that were played."""

    async def play(self) -> TokenEvent | None:
        """Begin a turn with the next recorded event of the text, and return it; None where all are played."""
        if not self.tape.is_left(self.number):
            return None
        event = await self.tape.play(self.number)
        self.played_ids += event.token_ids
        return event

    def record(self, event: TokenEvent) -> TokenEvent:
        """Record a new event, and return it as it is recorded."""
        if self.played_ids and event.detail is not None:
            event = msgspec.structs.replace(event, detail=_without_first(event.detail))
        self.tape.record(self.number, event)
        return event


def _without_first(detail: EventDetail) -> EventDetail:
    """Return a detail without what came with the text's first event."""
    return msgspec.structs.replace(detail, num_cached_tokens=None, num_prompt_tokens=None)


class TapedGeneration:
    """The token events of one text: those on its tape, then the engine's, which goes on from there.

    The engine gets the request when the tape is played, and not at all where the text ends before.
    """

    def __init__(self, tape: TextTape, start: StartGeneration) -> None:
        """`start` submits the request, with the tokens that come before."""
        self._tape = tape
        self._start = start
        self._is_over = False
        self._generation: GenerationStream | None = None

    async def pass_to(self, consumer: Consumer[TokenEvent]) -> None:
        """Push all events as `GenerationStream.pass_to`."""
        while not self._is_over and (event := await self._tape.play()) is not None:
            try:
                is_ready = consumer.take(event)
            finally:
                self._tape.tape.end_turn()
            if not is_ready:
                await consumer.ready()
            self._is_over = self._is_over or event.finish_reason is not None
        if self._is_over or not self._tape.tape.goes_on:
            return
        with self._start(self._tape.played_ids) as self._generation:
            await self._tape.tape.wait_played()
            await self._generation.pass_to(Mapped(self._tape.record, consumer))

    def stop(self) -> None:
        """End the text before the engine does."""
        self._is_over = True
        if self._generation is not None:
            self._generation.stop()
