"""Events that need not pass every generator on their way: from the engine's frame straight to the client's connection.

Each generator between the two costs a step of a task for each event. A stream of plain text in its middle needs none of
them: what each does with an event is a function, and these are called one after the other.
"""

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Sink(NamedTuple, Generic[T]):
    """Takes events at once. `receive` is only to be called while `is_open` says so, else the event would wait."""

    receive: Callable[[T], None]
    is_open: Callable[[], bool]


class RelayedEvents(AsyncGenerator[T, None]):
    """An asynchronous generator whose events may also go to a sink.

    The iterator gets those that the sink cannot take, the last one always. So it must be iterated as before, and has
    nothing to do meanwhile.
    """

    def __init__(self, events: AsyncGenerator[T, None], divert: Callable[[Sink[T]], None]) -> None:
        """`divert` may ignore its sink: then the iterator gets everything."""
        self._events = events
        self.divert = divert

    async def __anext__(self) -> T:
        return await self._events.__anext__()

    async def asend(self, value: None) -> T:
        return await self._events.asend(value)

    async def athrow(
        self,
        typ: type[BaseException] | BaseException,
        val: BaseException | object = None,
        tb: TracebackType | None = None,
    ) -> T:
        given: Any = (typ, val, tb)
        thrown: T = await self._events.athrow(*given)
        return thrown

    async def aclose(self) -> None:
        await self._events.aclose()
