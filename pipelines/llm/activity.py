"""What a language model's text side generates now, and how long its prompts and answers have been."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from engine.client.stream import GenerationStream
from serving.latencies import Histogram

LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
"""In tokens; TensorRT-LLM's."""


class Unstarted(NamedTuple):
    """Requests that the engine has and that have no token yet: they wait, or their prefill runs."""

    num_requests: int
    num_prompt_tokens: int


class TextActivity:
    """Of one version of a model, on the event loop's thread."""

    def __init__(self) -> None:
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.output_lengths = Histogram(LENGTH_BUCKETS)
        """In tokens, of answered requests."""
        self._num_open = 0
        self._streams: dict[int, GenerationStream] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_idle(self) -> bool:
        return self._num_open == 0

    async def wait_idle(self) -> None:
        await self._idle.wait()

    @contextmanager
    def open(self) -> Iterator[None]:
        """While it lasts, something is being generated."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    @contextmanager
    def follow(self, generation: GenerationStream) -> Iterator[GenerationStream]:
        """A generation until its reader is done with it; then it is cancelled."""
        self._streams[generation.stream_id] = generation
        try:
            yield generation
        finally:
            del self._streams[generation.stream_id]
            generation.cancel()

    def count_answer(self, num_prompt: int, num_output: int) -> None:
        """A request was answered."""
        self.prompt_lengths.add(num_prompt)
        self.output_lengths.add(num_output)

    def unstarted(self) -> Unstarted:
        lengths = [len(each.request.prompt_token_ids) for each in self._streams.values() if not each.output_token_ids]
        return Unstarted(len(lengths), sum(lengths))
