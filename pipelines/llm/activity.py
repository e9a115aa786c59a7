"""What a language model does now and has done: its open generations, and the lengths of its answers."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from sluice.engine.client.stream import GenerationStream
from sluice.pipelines.text.stream import OpenTexts
from sluice.record.histogram import Histogram

LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
"""Bounds of the histograms of lengths, in tokens; TensorRT-LLM's."""


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
