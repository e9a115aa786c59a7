"""Prompt lookup: what followed the last few tokens when they stood in the context before."""

from engine.sequence import Sequence
from engine.speculation.drafter import Gate, TokenPrices

LENGTHS = (4, 2)
"""Numbers of tokens that must agree, the longest first."""

MANY_MISSES, LONGEST_REST = 16, 15
"""After so many looks in vain a sequence is looked at every fourth step, then more rarely still."""
SHORT = 8
"""So few new tokens are entered one by one."""

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
            if lookup.rests():
                sequence.drafts = []
                continue
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
        self._num_misses = 0
        self._num_rests = 0

    def rests(self) -> bool:
        """Whether not to look in this step: where nothing was found for long, few are worth it."""
        self._num_rests -= 1
        return self._num_rests >= 0

    def continuation(self, sequence: Sequence, most: int) -> list[int]:
        """Up to `most` tokens that may come next; none where the last tokens are new."""
        self._learn(sequence)
        tokens = sequence.token_ids
        for length in LENGTHS:
            position = self._next.get(tuple(tokens[-length:]))
            if position is not None:
                self._num_misses = 0
                return tokens[position : position + most]
        self._num_misses += 1
        if self._num_misses >= MANY_MISSES:
            self._num_rests = min(self._num_misses // MANY_MISSES * 3, LONGEST_REST)
        return []

    def _learn(self, sequence: Sequence) -> None:
        """Enter the runs that have got a token after them since the last time."""
        tokens, known = sequence.token_ids, self._next
        for length in LENGTHS:
            begin = max(self._num_seen, length)
            if sequence.num_tokens - begin > SHORT:
                fresh = tokens[begin - length :]
                runs = zip(*(fresh[offset:] for offset in range(length)), strict=False)
                known.update(zip(runs, range(begin, sequence.num_tokens), strict=False))
                continue
            for end in range(begin, sequence.num_tokens):
                known[tuple(tokens[end - length : end])] = end
        self._num_seen = sequence.num_tokens
