"""What sampling remembers of one sequence: its parameters, its tokens seen, its place in the random numbers."""

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from engine.types import SamplingParams


class Constraint(Protocol):
    """One sequence's place in its grammar. Used from the engine's thread."""

    def prepare(self) -> None:
        """Begin to work out, in the background, which tokens may come next.

        Called before the forward pass, so that it costs no time of its own. Without it `apply` does the work.
        """
        ...

    def apply(self, row: FloatArray) -> None:
        """Set the logits [vocab_size] of all tokens that may not come next to -inf, in place."""
        ...

    def accept(self, token_id: int) -> None:
        """The token that was chosen."""
        ...


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


class BadWords:
    """Sequences of two tokens or more: the last token of one is banned where all before it have just come.

    Prompt and output count alike, so that a sequence begun by the prompt is not completed either (as transformers'
    NoBadWordsLogitsProcessor has it).
    """

    def __init__(self, words: Iterable[tuple[int, ...]], prompt_token_ids: Sequence[int]) -> None:
        self._begun_by: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        reach = 1
        for word in words:
            beginning, last = word[:-1], word[-1]
            # Looked up by the token that has just come, so that a step costs one look-up however many there are.
            self._begun_by.setdefault(beginning[-1], []).append((beginning, last))
            reach = max(reach, len(beginning))
        self._recent = deque(prompt_token_ids[-reach:], maxlen=reach)
        self.banned = self._completing()
        """Tokens that would complete a sequence now."""

    def observe(self, token_id: int) -> None:
        """Take note of the token that has come."""
        self._recent.append(token_id)
        self.banned = self._completing()

    def _completing(self) -> NDArray[np.int32]:
        begun = self._begun_by.get(self._recent[-1], []) if self._recent else []
        recent = tuple(self._recent) if begun else ()
        lasts = [last for beginning, last in begun if recent[-len(beginning) :] == beginning]
        return np.array(lasts, np.int32)


NO_TOP_K = 2**31
"""top_k where it is off: more than any vocabulary has."""

_LEAST_TEMPERATURE = 1e-30
"""Below it 1 / temperature would leave float32; what is drawn is the likeliest token long before."""


class SamplingState:
    """One sequence's side of sampling.

    `output_token_ids` is output from before (a resumed sequence): the state is as if all of it had been observed,
    `constraint` included. `seen` counts prompt and output (for the repetition penalty), `output` the output alone
    (for presence and frequency); each is None where no penalty needs it.
    """

    __slots__ = (
        "_always_edits",
        "_bad_words",
        "_ends",
        "_never",
        "bias_ids",
        "bias_values",
        "constraint",
        "filters",
        "is_plain",
        "num_output",
        "output",
        "params",
        "seed",
        "seen",
    )

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_token_ids: frozenset[int],
        vocab_size: int,
        output_token_ids: Iterable[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        self.params = params
        self.constraint = constraint
        self.num_output = 0
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.seen = TokenCounts(prompt_token_ids) if params.repetition_penalty != 1.0 else None
        has_output_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.output = TokenCounts() if has_output_penalty else None
        self.bias_ids = np.array([*params.logit_bias], np.int32)
        self.bias_values = np.array([*params.logit_bias.values()], np.float32)
        self._ends = np.array(sorted(token_id for token_id in stop_token_ids if token_id < vocab_size), np.int32)
        self._never = np.array([word[0] for word in params.bad_words if len(word) == 1], np.int32)
        longer = [word for word in params.bad_words if len(word) > 1]
        self._bad_words = BadWords(longer, prompt_token_ids) if longer else None
        counts = self.seen is not None or self.output is not None
        self._always_edits = counts or constraint is not None or len(self.bias_ids) + len(self._never) > 0
        can_edit = self._always_edits or params.min_tokens > 0 or self._bad_words is not None
        self.is_plain = params.temperature == 0 and params.logprobs is None and not can_edit
        """Whether the likeliest token is all that is ever wanted."""
        self.filters = _filters(params)
        """temperature, top_k, top_p, min_p, typical_p: one row of the arrays that `draw` works on."""
        for token_id in output_token_ids:
            self.observe(token_id)

    @property
    def is_random(self) -> bool:
        return self.params.temperature > 0

    @property
    def is_held_open(self) -> bool:
        """Whether it is too early to stop."""
        return self.num_output < self.params.min_tokens and len(self._ends) > 0

    @property
    def edits_logits(self) -> bool:
        """Whether this sequence's logits are changed before a token is chosen."""
        if self._always_edits or self.is_held_open:
            return True
        return self._bad_words is not None and len(self._bad_words.banned) > 0

    @property
    def banned(self) -> NDArray[np.int32]:
        """Tokens that must not come next; constraints aside."""
        banned = self._never
        if self.is_held_open:
            banned = np.concatenate([banned, self._ends])
        if self._bad_words is not None:
            banned = np.concatenate([banned, self._bad_words.banned])
        return banned

    def observe(self, token_id: int) -> None:
        """Take note of the token that was chosen."""
        self.num_output += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.output is not None:
            self.output.add(token_id)
        if self._bad_words is not None:
            self._bad_words.observe(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)


def _filters(params: SamplingParams) -> tuple[float, float, float, float, float]:
    temperature = max(params.temperature, _LEAST_TEMPERATURE)
    return temperature, params.top_k or NO_TOP_K, params.top_p, params.min_p, params.typical_p
