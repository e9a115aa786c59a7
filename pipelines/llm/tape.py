"""The tokens of a request's texts on tape: recorded as they come, and played before the engine goes on with them.

What is made of the tokens comes again as it was: in the same pieces, and where there are several texts, in the same
order of them all.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, Self

import msgspec

from sluice.engine.types import EventDetail, TokenEvent

Record = Callable[[int, TokenEvent], None]
"""Receives the number of a text, and its next event before anybody sees it."""


class Tape:
    """The tape of one request. Its texts take turns: one begins when what was made of the last event is passed on."""

    def __init__(self, record: Record, recorded: Sequence[tuple[int, TokenEvent]] = ()) -> None:
        """Play the events `recorded` first, by the numbers of their texts; `record` receives those that follow."""
        self.record = record
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

    async def begin(self) -> None:
        """Begin a turn for an event that is not on the tape, after all that are."""
        await self._begin_turn(lambda: not self._left)

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

    async def record(self, event: TokenEvent) -> TokenEvent:
        """Begin a turn with a new event, and return it as it is recorded."""
        if self.played_ids and event.detail is not None:
            event = msgspec.structs.replace(event, detail=_without_first(event.detail))
        await self.tape.begin()
        self.tape.record(self.number, event)
        return event


def _without_first(detail: EventDetail) -> EventDetail:
    """Return a detail without what came with the text's first event."""
    return msgspec.structs.replace(detail, num_cached_tokens=None, num_prompt_tokens=None)


class Generation(Protocol):
    """The token events of one request in the engine."""

    async def __anext__(self) -> TokenEvent: ...

    def cancel(self) -> None: ...


class TapedGeneration:
    """The token events of one text: those on its tape, then the engine's, which goes on from there.

    The engine gets the request when the tape is played, and not at all where the text ends before.
    """

    def __init__(self, tape: TextTape, start: Callable[[Sequence[int]], AbstractContextManager[Generation]]) -> None:
        """`start` submits the request, with the tokens that come before."""
        self._tape = tape
        self._start = start
        self._has_turn = self._has_ended = False
        self._followed: AbstractContextManager[Generation] | None = None
        self._generation: Generation | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_turn()
        if self._followed is not None:
            self._followed.__exit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> TokenEvent:
        self._end_turn()
        if self._has_ended:
            raise StopAsyncIteration
        event = await self._tape.play() if self._generation is None else None
        if event is None:
            event = await self._tape.record(await anext(self._open()))
        self._has_turn, self._has_ended = True, event.finish_reason is not None
        return event

    def _open(self) -> "Generation":
        if self._generation is None:
            self._followed = self._start(self._tape.played_ids)
            self._generation = self._followed.__enter__()
        return self._generation

    def _end_turn(self) -> None:
        if self._has_turn:
            self._has_turn = False
            self._tape.tape.end_turn()

    def cancel(self) -> None:
        if self._generation is not None:
            self._generation.cancel()
