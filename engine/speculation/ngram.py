"""Prompt lookup: drafts are the tokens that followed the last few tokens earlier in the context."""

from sluice.engine.sequence import Sequence
from sluice.engine.speculation.drafter import DraftGate, TokenPrices

LENGTHS = (4, 2)
"""Lengths of the n-grams that are looked up, the longest first."""

MANY_MISSES, LONGEST_REST = 16, 15
"""After so many lookups without a match, only every fourth step looks up, then ever fewer: 1 in LONGEST_REST + 1."""
FEW_TOKENS = 8
"""Up to this many new tokens are indexed one by one, more in bulk."""

Gram = tuple[int, ...]


class NgramDrafter:
    """Drafts from each sequence's own context. They cost nothing, and are right where text is copied (RAG, code)."""

    def __init__(self, num_drafts: int) -> None:
        self._num_drafts = num_drafts
        self._states: dict[int, tuple[NgramIndex, DraftGate]] = {}

    def propose(self, decoding: list[Sequence], prices: TokenPrices) -> None:
        """Set the drafts of each sequence that are worth checking."""
        for sequence in decoding:
            index, gate = self._state(sequence)
            if index.skips_step():
                sequence.drafts = []
                continue
            most = gate.num_drafts(min(self._num_drafts, sequence.max_drafts), prices)
            sequence.drafts = index.find_continuation(sequence, most) if most > 0 else []

    def _state(self, sequence: Sequence) -> "tuple[NgramIndex, DraftGate]":
        state = self._states.get(sequence.stream_id)
        if state is None:
            index = NgramIndex(sequence.request.predicted_token_ids)
            state = self._states[sequence.stream_id] = (index, DraftGate())
        return state

    def observe(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        self._states[sequence.stream_id][1].observe(num_drafts, num_accepted)

    def forget(self, stream_id: int) -> None:
        self._states.pop(stream_id, None)


class NgramIndex:
    """Maps each n-gram of one sequence, and of the text that its client predicts, to the index of the token that
    followed its last occurrence there."""

    def __init__(self, predicted: list[int] | None = None) -> None:
        self._next: dict[Gram, int] = {}
        self._predicted = predicted = predicted or []
        self._next_predicted = {
            tuple(predicted[end - length : end]): end for length in LENGTHS for end in range(length, len(predicted))
        }
        self._num_seen = 0
        self._num_misses = 0
        self._num_rests = 0

    def skips_step(self) -> bool:
        """Return whether to skip the lookup in this step, because many before it found nothing."""
        self._num_rests -= 1
        return self._num_rests >= 0

    def find_continuation(self, sequence: Sequence, most: int) -> list[int]:
        """Return up to `most` tokens that may come next; none if the last n-grams are new."""
        self._learn(sequence)
        tokens = sequence.token_ids
        predicted = self._find_predicted(tokens, sequence.num_output, most) if self._predicted else []
        if predicted:
            self._num_misses = 0
            return predicted
        for length in LENGTHS:
            position = self._next.get(tuple(tokens[-length:]))
            if position is not None:
                self._num_misses = 0
                return tokens[position : position + most]
        self._num_misses += 1
        if self._num_misses >= MANY_MISSES:
            self._num_rests = min(self._num_misses // MANY_MISSES * 3, LONGEST_REST)
        return []

    def _find_predicted(self, tokens: list[int], num_output: int, most: int) -> list[int]:
        """Return the tokens that follow the end of the output in the prediction, which the output may begin with."""
        if num_output < LENGTHS[-1]:
            is_begun = self._predicted[:num_output] == tokens[len(tokens) - num_output :]
            return self._predicted[num_output : num_output + most] if is_begun else []
        ends = (self._next_predicted.get(tuple(tokens[-length:])) for length in LENGTHS if length <= num_output)
        end = next((end for end in ends if end is not None), None)
        return [] if end is None else self._predicted[end : end + most]

    def _learn(self, sequence: Sequence) -> None:
        """Index the n-grams that got a following token since the last call."""
        tokens, known = sequence.token_ids, self._next
        for length in LENGTHS:
            begin = max(self._num_seen, length)
            if sequence.num_tokens - begin > FEW_TOKENS:
                fresh = tokens[begin - length :]
                ngrams = zip(*(fresh[offset:] for offset in range(length)), strict=False)
                known.update(zip(ngrams, range(begin, sequence.num_tokens), strict=False))
                continue
            for end in range(begin, sequence.num_tokens):
                known[tuple(tokens[end - length : end])] = end
        self._num_seen = sequence.num_tokens
