"""Consumers that a generation's events pass on their way from the engine's frame to a client's connection."""

from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from sluice.engine.client.stream import Consumer
from sluice.engine.types import EventDetail, TokenEvent
from sluice.pipelines.text.logprobs import PromptEcho
from sluice.pipelines.text.stream import StreamRecord, TextStream, check_complete, timed_feed, with_prompt_end
from sluice.pipelines.text.types import TextEvent

T = TypeVar("T")
U = TypeVar("U")

Generate = Callable[[Consumer[TextEvent]], Coroutine[Any, Any, None]]
"""Generates one text: pushes its events to a consumer, up to the last one. Cancelling it cancels the request."""
ObserveDetail = Callable[[EventDetail], None]


async def give(consumer: Consumer[T], event: T) -> None:
    """Have a consumer take an event, and wait until it is ready for the next one."""
    if not consumer.take(event):
        await consumer.ready()


class Called(Generic[T]):
    """Calls a function with each event, and is always ready."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[T], object]) -> None:
        self._function = function

    def take(self, event: T) -> bool:
        self._function(event)
        return True

    async def ready(self) -> None: ...


class Mapped(Generic[T, U]):
    """Passes on what a function makes of each event."""

    __slots__ = ("_make", "_pass_on", "ready")

    def __init__(self, make: Callable[[T], U], consumer: Consumer[U]) -> None:
        self._make = make
        self._pass_on = consumer.take
        self.ready = consumer.ready

    def take(self, event: T) -> bool:
        return self._pass_on(self._make(event))


class TextEvents:
    """Passes on the text of one generation's token events, the first one with what belongs to the prompt."""

    def __init__(
        self,
        stream: TextStream,
        record: StreamRecord,
        consumer: Consumer[TextEvent],
        *,
        prompt_end: str = "",
        echo: PromptEcho | None = None,
        is_echo_alone: bool = False,
        on_detail: ObserveDetail | None = None,
        on_end: Callable[[int, int], None] | None = None,
    ) -> None:
        """`on_detail` gets the details of the engine's events before the text event that they lead to. `on_end` gets
        the numbers of tokens of the prompt and of a complete text. `is_echo_alone`: the text is the prompt."""
        self.stop_generation: Callable[[], None]
        """Called when the text ends, which may be before the engine ends it."""
        self._feed = timed_feed(stream.feed)
        self._observe = record.observe
        self._pass_on = consumer.take
        self.ready = consumer.ready
        self._prompt_end = prompt_end
        self._echo = echo
        self._is_echo_alone = is_echo_alone
        self._on_detail = on_detail
        self._on_end = on_end

    def take(self, token_event: TokenEvent) -> bool:
        if token_event.detail is not None and self._on_detail is not None:
            self._on_detail(token_event.detail)
        event = self._feed(token_event)
        if event is None:
            return True
        if self._prompt_end or self._echo:
            event = self._with_prompt(event)
        if event.finish_reason is not None:
            self.stop_generation()
            check_complete(event)
            if self._on_end is not None:
                self._on_end(event.prompt_tokens, event.completion_tokens)
        self._observe(event)
        return self._pass_on(event)

    def _with_prompt(self, event: TextEvent) -> TextEvent:
        prompt_end, self._prompt_end = self._prompt_end, ""
        echo, self._echo = self._echo, None
        if prompt_end:
            event = with_prompt_end(event, prompt_end)
        if echo is None:
            return event
        return echo.alone(event) if self._is_echo_alone else echo.prepend_to(event)
