"""Prompt lookup: what followed the last few tokens when they stood in the context before."""

from engine.sequence import Sequence
from engine.speculation.gate import Gate, TokenPrices

LENGTHS = (4, 2)
"""Numbers of tokens that must agree, the longest first."""

Gram = tuple[int, ...]


class NgramDrafter:
    """Drafts from each sequence's own context: free, and right wherever text is copied (quotes, RAG, code)."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._lookups: dict[int, tuple[Lookup, Gate]] = {}

    def propose(self, decoding: list[Sequence], prices: TokenPrices) -> None:
        """Give each sequence the drafts that are worth checking."""
        for sequence in decoding:
            lookup, gate = self._of(sequence)
            most = gate.num_drafts(min(self._num_drafts, sequence.max_drafts), prices)
            sequence.drafts = lookup.continuation(sequence, most) if most > 0 else []

    def _of(self, sequence: Sequence) -> "tuple[Lookup, Gate]":
        entry = self._lookups.get(sequence.stream_id)
        if entry is None:
            entry = self._lookups[sequence.stream_id] = (Lookup(), Gate())
        return entry

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._lookups[sequence.stream_id][1].observe(num_drafts, num_accepted)

    def forget(self, stream_id: int) -> None:
        self._lookups.pop(stream_id, None)


class Lookup:
    """Where each run of tokens of one sequence last stood: the index of the token that followed it."""

    def __init__(self) -> None:
        self._next: dict[Gram, int] = {}
        self._num_seen = 0

    def continuation(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where the last tokens are new."""
        self._learn(sequence)
        tail = sequence.token_ids[-LENGTHS[0] :]
        for length in LENGTHS:
            position = self._next.get(tuple(tail[-length:])) if len(tail) >= length else None
            if position is not None:
                return sequence.token_ids[position : position + most]
        return []

    def _learn(self, sequence: Sequence) -> None:
        """Enter the runs that have got a token after them since the last time."""
        begin = max(self._num_seen - LENGTHS[0], 0)
        fresh = sequence.token_ids[begin:]
        for length in LENGTHS:
            runs = zip(*(fresh[offset:] for offset in range(length + 1)), strict=False)
            ends = range(begin + length, sequence.num_tokens)
            self._next.update((run[:length], end) for run, end in zip(runs, ends, strict=True))
        self._num_seen = sequence.num_tokens
