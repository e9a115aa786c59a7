"""Drafts from a smaller model with the same vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from sluice.engine.kv_cache import KvCacheManager
from sluice.engine.runners.base import Runner, StepBatch
from sluice.engine.sequence import Sequence
from sluice.engine.speculation.drafter import DraftGate, TokenPrices

COST_RATE = 1.0 / 32
"""Weight of the draft model's latest step in the running mean of the cost of a draft token."""


@dataclass(slots=True)
class _DraftState:
    """The draft model's state of one sequence."""

    gate: DraftGate = field(default_factory=DraftGate)
    num_computed: int = 0
    """Tokens at the beginning of the context whose K and V are in the draft model's cache."""
    base: int = 0
    """Length of the context when `drafts` were made. All of them but the last were computed too."""
    drafts: list[int] = field(default_factory=list)


_Piece = tuple[Sequence, _DraftState, int, NDArray[np.int32]]
"""A sequence, its state, how many drafts it gets, and the tokens to compute next."""


class DraftModel:
    """Greedy drafts of a small model. Its cache has as many blocks as the model's, and they share the block tables: a
    block that the planner allocates has the K and V of both models. It prefills a context in chunks of its own, between
    the model's steps, and drafts once it has caught up."""

    def __init__(
        self,
        runner: Runner,
        kv: KvCacheManager,
        num_drafts: int,
        max_num_batched_tokens: int,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`runner` must have as many blocks as `kv`, of the same size."""
        self._runner = runner
        self._kv = kv
        self._num_drafts = num_drafts
        self._max_num_batched_tokens = max_num_batched_tokens
        self._clock = clock
        self._states: dict[int, _DraftState] = {}
        self._seconds_per_token = 0.0

    def propose(self, decoding: list[Sequence], prices: TokenPrices) -> None:
        """Set the drafts of each sequence that are worth making and checking."""
        prices = TokenPrices(prices.value_s, prices.cost_s + self._seconds_per_token)
        tokens_left = self._max_num_batched_tokens
        work: list[tuple[Sequence, _DraftState, int]] = []
        for sequence in decoding:
            sequence.drafts = []
            state = self._states.setdefault(sequence.stream_id, _DraftState())
            _keep_accepted(state, sequence)
            most = state.gate.num_drafts(min(self._num_drafts, sequence.max_drafts), prices)
            if most > 0 and tokens_left > 0:
                work.append((sequence, state, most))
                tokens_left -= sequence.num_tokens - state.num_computed
        if work:
            self._draft(work)

    def _draft(self, work: list[tuple[Sequence, _DraftState, int]]) -> None:
        """Catch up with each context, then draft token by token."""
        for sequence, state, most in work:
            self._kv.allocate(sequence, sequence.num_tokens + most)
            state.base, state.drafts = sequence.num_tokens, []
        pieces = [
            (s, state, most, _tokens(s, state.num_computed, self._max_num_batched_tokens)) for s, state, most in work
        ]
        while pieces:
            token_ids = self._run(pieces)
            following = []
            for (sequence, state, most, tokens), token_id in zip(pieces, token_ids, strict=True):
                state.num_computed += len(tokens)
                if state.num_computed < sequence.num_tokens:
                    continue  # a long context: the next call continues with it
                state.drafts.append(token_id)
                if len(state.drafts) < most:
                    following.append((sequence, state, most, np.array([token_id], np.int32)))
            pieces = following
        for sequence, state, _ in work:
            sequence.drafts = list(state.drafts)

    def _run(self, pieces: list[_Piece]) -> list[int]:
        """Compute the pieces. Returns the most likely token after each."""
        lengths = np.array([len(tokens) for _, _, _, tokens in pieces], np.int32)
        past = np.array([state.num_computed for _, state, _, _ in pieces], np.int32)
        begins = np.zeros(len(pieces) + 1, np.int32)
        np.cumsum(lengths, out=begins[1:])
        block_indices, block_indices_begins = self._kv.tables.gather([piece[0].table_row for piece in pieces])
        started = self._clock()
        logits = self._runner.run(
            StepBatch(
                token_ids=np.concatenate([tokens for _, _, _, tokens in pieces]),
                position_ids=np.arange(begins[-1], dtype=np.int32) + np.repeat(past - begins[:-1], lengths),
                past_lens=past,
                subsequence_begins=begins,
                block_indices=block_indices,
                block_indices_begins=block_indices_begins,
                sampled_rows=begins[1:] - 1,
                max_context_len=int((past + lengths).max()),
            )
        )
        if len(begins) - 1 == begins[-1]:  # a step of single tokens, as drafts are
            seconds = (self._clock() - started) / len(pieces)
            self._seconds_per_token += COST_RATE * (seconds - self._seconds_per_token)
        token_ids: list[int] = logits.argmax(np.arange(logits.num_rows))[0].tolist()
        return token_ids

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._states[sequence.stream_id].gate.observe(num_drafts, num_accepted)

    def forget(self, stream_id: int) -> None:
        self._states.pop(stream_id, None)

    def close(self) -> None:
        self._runner.close()


def _tokens(sequence: Sequence, begin: int, most: int) -> NDArray[np.int32]:
    return np.array(sequence.token_ids[begin : begin + most], np.int32)


def _keep_accepted(state: _DraftState, sequence: Sequence) -> None:
    """Discard what was computed of drafts that were not accepted."""
    actual = sequence.token_ids[state.base : state.base + len(state.drafts)]
    num_accepted = 0
    for draft, token_id in zip(state.drafts, actual, strict=False):
        if draft != token_id:
            break
        num_accepted += 1
    if state.drafts:
        state.num_computed = min(state.num_computed, state.base + num_accepted)
