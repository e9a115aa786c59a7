"""A language model's open generations, the lengths of its answers, and requests that wait for an engine."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from time import perf_counter
from typing import NamedTuple

import msgspec

from sluice.engine.client.stream import GenerationStream
from sluice.engine.fleet.client import Engine
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.stream import OpenTexts
from sluice.pipelines.text.types import TextRequest
from sluice.record.histogram import Histogram

LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
"""Bounds of the histograms of lengths, in tokens; TensorRT-LLM's."""
_LEAST_S = 0.001
held_listener: ContextVar[Callable[[], None] | None] = ContextVar("held_listener", default=None)
"""Hears that the current request waits for an engine, which may take minutes."""


class Unstarted(NamedTuple):
    """Requests in the engine without a token yet: they wait, or their prefill runs."""

    num_requests: int
    num_prompt_tokens: int


class TextActivity:
    """A model version's open generations, and its lengths of prompts and answers. Only the event loop uses it."""

    def __init__(self) -> None:
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.output_lengths = Histogram(LENGTH_BUCKETS)
        """Lengths of answered requests, in tokens."""
        self.texts = OpenTexts()
        self._streams: dict[int, GenerationStream] = {}

    @contextmanager
    def follow(self, generation: GenerationStream) -> Iterator[GenerationStream]:
        """Follow a generation until its reader is done with it, and cancel it then."""
        number = generation.stream_id  # another one once the generation has moved to another engine
        self._streams[number] = generation
        try:
            yield generation
        finally:
            del self._streams[number]
            generation.cancel()

    @property
    def generations(self) -> Mapping[int, GenerationStream]:
        """The open generations, by a number that no other process has and that stays where one moves."""
        return self._streams

    def count_answer(self, num_prompt: int, num_output: int) -> None:
        """Count an answered request and its lengths in tokens."""
        self.prompt_lengths.add(num_prompt)
        self.output_lengths.add(num_output)

    def unstarted(self) -> Unstarted:
        """Count the requests without a token yet, and their prompts' tokens."""
        lengths = [len(each.request.prompt_token_ids) for each in self._streams.values() if not each.output_token_ids]
        return Unstarted(len(lengths), sum(lengths))


async def wait_for_engine(engine: Engine, request: TextRequest) -> TextRequest:
    """Wait until the engine is awake, and return the request with the time that it has left. Raises as
    `Engine.wait_awake`, and DEADLINE where the request's time is over before."""
    limits = [each for each in (request.timeout_s, request.queue_timeout_s) if each is not None]
    began = perf_counter()
    if (note_held := held_listener.get()) is not None:
        note_held()
    try:
        async with asyncio.timeout(min(limits, default=None)):
            await engine.wait_awake()
    except TimeoutError:
        message = f"the request waited {min(limits):g} s for an engine to start, all the time that it has"
        raise SluiceError(ErrorCode.DEADLINE, message) from None
    waited_s = perf_counter() - began
    return msgspec.structs.replace(
        request,
        timeout_s=_left(request.timeout_s, waited_s),
        queue_timeout_s=_left(request.queue_timeout_s, waited_s),
    )


def _left(limit_s: float | None, waited_s: float) -> float | None:
    return None if limit_s is None else max(limit_s - waited_s, _LEAST_S)
