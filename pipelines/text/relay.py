"""Events that need not pass every generator on their way: from the engine's frame straight to the client's connection.

Each generator between the two costs a step of a task for each event. A stream of plain text in its middle needs none of
them: what each does with an event is a function, and these are called one after the other.
"""

from collections.abc import AsyncGenerator, Callable
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from sluice.engine.client.stream import GenerationStream
from sluice.engine.types import TokenEvent
from sluice.pipelines.text.stream import StreamRecord, TextStream, timed_feed
from sluice.pipelines.text.types import TextEvent

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


class DivertedGeneration:
    """A generation from its submission on: its plain events may go straight to a sink."""

    def __init__(self) -> None:
        self._divert: Callable[[Sink[TextEvent]], None] | None = None

    def begin(self, generation: GenerationStream, stream: TextStream, record: StreamRecord) -> None:
        """Note what an event passes on its way. Where one may end the text, all go the usual way."""
        if not stream.is_plain:
            return
        feed = timed_feed(stream.feed)

        def divert(sink: Sink[TextEvent]) -> None:
            def receive(token_event: TokenEvent) -> None:
                event = feed(token_event)
                if event is not None:
                    record.observe(event)
                    sink.receive(event)

            generation.divert(receive, sink.is_open)

        self._divert = divert

    def divert(self, sink: Sink[TextEvent]) -> None:
        """Have the sink take plain events from now on. To be called after the first event."""
        if self._divert is not None:
            self._divert(sink)
