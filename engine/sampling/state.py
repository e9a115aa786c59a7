"""The sampling state of one sequence: parameters, token counts, bad words, constraint, random seed."""

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from sluice.engine.runners.base import NO_TOP_K, Statistic, TokenMask
from sluice.engine.types import SamplingParams, ThinkingBudget

_LEAST_TEMPERATURE = 1e-30
"""Below it 1 / temperature would overflow float32; long before, the most likely token is always drawn."""


def is_simple(params: SamplingParams) -> bool:
    """Return whether a token is chosen from the model's own logits, and nothing but the token is reported."""
    has_penalty = params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    has_tokens = bool(params.logit_bias or params.allowed_token_ids or params.bad_words or params.min_tokens)
    is_free = params.grammar is None and params.thinking_token_budget is None
    return not (has_penalty or has_tokens) and params.logprobs is None and is_free


def _wanted(top_k: int, top_p: float, min_p: float, typical_p: float) -> Statistic:
    if top_k < NO_TOP_K:
        return Statistic.NOTHING
    if top_p < 1:
        return Statistic.TOTAL
    if min_p > 0:
        return Statistic.NOTHING
    return Statistic.MEAN if typical_p < 1 else Statistic.CHUNKS


class Constraint(Protocol):
    """A constraint on one sequence's output, such as a grammar. Used from the engine thread."""

    def prepare(self) -> None:
        """Start to compute the next mask in the background, hidden by the forward pass. `mask` does it otherwise."""
        ...

    def mask(self) -> TokenMask:
        """Return the tokens that may come next. Raises SluiceError if the constraint cannot be followed any further."""
        ...

    def accept(self, token_id: int) -> None:
        """Advance by the token that was chosen."""
        ...


class SamplingState:
    """The sampling parameters of one sequence, and what they need to know of its tokens.

    `output_token_ids` is earlier output (of a resumed sequence): the state is as if all of it had been observed,
    including by `constraint`. `seen` counts prompt and output (for the repetition penalty), `output` the output alone
    (for presence and frequency); each is None if no penalty needs it.
    """

    __slots__ = (
        "_allowed",
        "_always_edits",
        "_bad_words",
        "_ends",
        "_never",
        "_thinking",
        "_vocab_size",
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
        "wanted",
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
        self._vocab_size = vocab_size
        self.seed = secrets.randbits(64) if params.seed is None else params.seed
        self.seen = TokenCounts(prompt_token_ids) if params.repetition_penalty != 1.0 else None
        has_output_penalty = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
        self.output = TokenCounts() if has_output_penalty else None
        self.bias_ids = np.array([*params.logit_bias], np.int32)
        self.bias_values = np.array([*params.logit_bias.values()], np.float32)
        self._allowed = np.array(params.allowed_token_ids, np.int32)
        budget = params.thinking_token_budget
        self._thinking = None if budget is None else ReasoningCounter(budget, prompt_token_ids)
        self._ends = np.array(sorted(token_id for token_id in stop_token_ids if token_id < vocab_size), np.int32)
        self._never = np.array([word[0] for word in params.bad_words if len(word) == 1], np.int32)
        longer = [word for word in params.bad_words if len(word) > 1]
        self._bad_words = BadWords(longer, prompt_token_ids) if longer else None
        has_penalty = self.seen is not None or self.output is not None
        num_ids = len(self.bias_ids) + len(self._never) + len(self._allowed)
        self._always_edits = has_penalty or constraint is not None or num_ids > 0
        self.is_plain = params.temperature == 0 and is_simple(params) and constraint is None
        """Whether sampling always takes the most likely token and nothing else is requested."""
        temperature = max(params.temperature, _LEAST_TEMPERATURE)
        top_k = params.top_k if 0 < params.top_k < vocab_size else NO_TOP_K
        self.filters = (temperature, top_k, params.top_p, params.min_p, params.typical_p)
        """temperature, top_k, top_p, min_p and typical_p: one row of the arrays in `Draws`."""
        self.wanted = _wanted(*self.filters[1:])
        for token_id in output_token_ids:
            self.observe(token_id)

    @property
    def is_random(self) -> bool:
        return self.params.temperature > 0

    @property
    def must_continue(self) -> bool:
        """Whether min_tokens forbids the sequence to stop now."""
        return self.num_output < self.params.min_tokens and len(self._ends) > 0

    @property
    def edits_logits(self) -> bool:
        """Whether this sequence's logits are edited before a token is chosen."""
        if self._always_edits or self.must_continue or (self._thinking and self._thinking.forced is not None):
            return True
        return self._bad_words is not None and len(self._bad_words.banned) > 0

    @property
    def allowed(self) -> NDArray[np.int32]:
        """The only tokens that may come next, none for all. The reasoning is not closed within a character, which a
        constraint forbids."""
        forced = None if self._thinking is None else self._thinking.forced
        if forced is None or (self.constraint is not None and not self._may_come(forced, self.constraint)):
            return self._allowed
        return np.array([forced], np.int32)

    def _may_come(self, token_id: int, constraint: Constraint) -> bool:
        row = np.zeros(self._vocab_size, np.float32)
        constraint.mask().apply(row)
        return bool(np.isfinite(row[token_id]))

    @property
    def banned(self) -> NDArray[np.int32]:
        """Tokens that must not come next, apart from those that the constraint forbids."""
        banned = self._never
        if self.must_continue:
            banned = np.concatenate([banned, self._ends])
        if self._bad_words is not None:
            banned = np.concatenate([banned, self._bad_words.banned])
        return banned

    def observe(self, token_id: int) -> None:
        """Update the state after the token that was chosen."""
        self.num_output += 1
        if self.seen is not None:
            self.seen.add(token_id)
        if self.output is not None:
            self.output.add(token_id)
        if self._bad_words is not None:
            self._bad_words.observe(token_id)
        if self._thinking is not None:
            self._thinking.observe(token_id)
        if self.constraint is not None:
            self.constraint.accept(token_id)


class ReasoningCounter:
    """Counts the tokens of the reasoning, and closes it where its budget is spent. What the model has begun to close by
    itself goes on from there."""

    def __init__(self, budget: ThinkingBudget, prompt_token_ids: Sequence[int]) -> None:
        self._budget = budget
        self._recent: deque[int] = deque(maxlen=max(len(budget.start), len(budget.end)))
        self._count: int | None = None
        """Tokens since the reasoning began; None outside of it."""
        ids = np.asarray(prompt_token_ids, np.int32)
        start, end = (_last(ids, mark) for mark in (budget.start, budget.end))
        if start > end:
            self._count = len(ids) - start - len(budget.start)
        self._recent.extend(prompt_token_ids[-(self._recent.maxlen or 1) :])

    @property
    def forced(self) -> int | None:
        """The token that must come next; None for any."""
        if self._count is None:
            return None
        end = self._budget.end
        num_begun = next(size for size in range(len(end) - 1, -1, -1) if self._is_last(end[:size]))
        return end[num_begun] if self._count - num_begun >= self._budget.num_tokens else None

    def observe(self, token_id: int) -> None:
        self._recent.append(token_id)
        if self._is_last(self._budget.end):
            self._count = None
        elif self._is_last(self._budget.start):
            self._count = 0
        elif self._count is not None:
            self._count += 1

    def _is_last(self, mark: tuple[int, ...]) -> bool:
        return not mark or tuple(self._recent)[-len(mark) :] == mark


def _last(ids: NDArray[np.int32], mark: tuple[int, ...]) -> int:
    """Return where `mark` begins for the last time, -1 for nowhere."""
    places = np.flatnonzero(ids == mark[0])[::-1].tolist()
    return next((place for place in places if tuple(ids[place : place + len(mark)].tolist()) == mark), -1)


class TokenCounts:
    """Counts of distinct token ids in growing arrays: a penalty touches only seen tokens, not the whole vocabulary."""

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
    """Bad words of two tokens or more: the last is banned if all before it have just occurred, in prompt or output, so
    that a word begun by the prompt is not completed (transformers' NoBadWordsLogitsProcessor)."""

    def __init__(self, words: Iterable[tuple[int, ...]], prompt_token_ids: Sequence[int]) -> None:
        self._words_by_token: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        """(beginning, last token) of each word, by the last token of its beginning, so that a step costs one lookup."""
        reach = 1
        for word in words:
            beginning, last = word[:-1], word[-1]
            self._words_by_token.setdefault(beginning[-1], []).append((beginning, last))
            reach = max(reach, len(beginning))
        self._recent = deque(prompt_token_ids[-reach:], maxlen=reach)
        self.banned = self._completing_tokens()
        """Tokens that would complete a word now."""

    def observe(self, token_id: int) -> None:
        """Update `banned` after a new token."""
        self._recent.append(token_id)
        self.banned = self._completing_tokens()

    def _completing_tokens(self) -> NDArray[np.int32]:
        begun = self._words_by_token.get(self._recent[-1], []) if self._recent else []
        recent = tuple(self._recent) if begun else ()
        lasts = [last for beginning, last in begun if recent[-len(beginning) :] == beginning]
        return np.array(lasts, np.int32)
