"""What sampling remembers of one sequence: its parameters, its tokens seen, its random numbers."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from engine.types import SamplingParams


class TokenCounts:
    """Distinct token ids and how often each came, in arrays that grow: a penalty then touches only the
    tokens seen, however large the vocabulary is."""

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.float32)
        self._positions: dict[int, int] = {}
        for token_id in token_ids:
            self.add(token_id)

    @property
    def ids(self) -> NDArray[np.int32]:
        return self._ids[: len(self._positions)]

    @property
    def counts(self) -> NDArray[np.float32]:
        return self._counts[: len(self._positions)]

    def add(self, token_id: int) -> None:
        position = self._positions.get(token_id)
        if position is None:
            position = len(self._positions)
            if position == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._positions[token_id] = position
            self._ids[position] = token_id
        self._counts[position] += 1


class SamplingState:
    """One sequence's side of sampling.

    `seen` holds prompt and output (for the repetition penalty), `output` the output alone (for presence and
    frequency); each is None where no penalty needs it. `generator` is the sequence's own, so that a seed
    gives the same numbers alone and in any crowd.
    """

    __slots__ = ("banned", "generator", "num_output", "output", "params", "seen")

    def __init__(
        self, params: SamplingParams, prompt_token_ids: list[int], stop_token_ids: frozenset[int], vocab_size: int
    ) -> None:
        self.params = params
        self.num_output = 0
        self.seen = TokenCounts(prompt_token_ids) if params.repetition_penalty != 1.0 else None
        has_output_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.output = TokenCounts() if has_output_penalty else None
        self.generator = np.random.default_rng(params.seed) if params.temperature > 0 else None
        is_held_open = params.min_tokens > 0
        ids = sorted(token_id for token_id in stop_token_ids if token_id < vocab_size) if is_held_open else []
        self.banned = np.array(ids, np.int32)
        """Ids that must not come before `min_tokens` did."""

    @property
    def edits_logits(self) -> bool:
        """Whether this sequence's logits are changed before a token is chosen."""
        return self.seen is not None or self.output is not None or self.is_held_open

    @property
    def is_held_open(self) -> bool:
        return self.num_output < self.params.min_tokens and len(self.banned) > 0

    def observe(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self.num_output += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.output is not None:
            self.output.add(token_id)
