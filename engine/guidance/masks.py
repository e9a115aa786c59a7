"""Which tokens may come next, in the form that is quickest to put on a row of logits."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from sluice.errors import invalid

WORD_BITS = 32

_FEW = 8
"""A set of at most an eighth of the vocabulary is kept as a list of tokens, which touches no others."""


class Mask(Protocol):
    """One set of tokens."""

    def apply(self, row: FloatArray) -> None:
        """Set the logits of all tokens that are not in the set to -inf.

        Raises SluiceError INVALID where that would leave none, if the set is small.
        """
        ...


@dataclass(frozen=True, slots=True)
class FewAllowed:
    """Structure: a bracket, the next letters of a key, a digit."""

    token_ids: NDArray[np.intp]

    def apply(self, row: FloatArray) -> None:
        kept = row[self.token_ids]
        if kept.max() == -np.inf:
            message = "the grammar allows only such tokens here as bad_words, min_tokens or logit_bias forbid"
            raise invalid("grammar", message)
        row.fill(-np.inf)
        row[self.token_ids] = kept


@dataclass(frozen=True, slots=True)
class FewForbidden:
    """Free text: all but quotes and control characters."""

    token_ids: NDArray[np.intp]

    def apply(self, row: FloatArray) -> None:
        row[self.token_ids] = -np.inf


@dataclass(frozen=True, slots=True)
class Mixed:
    """Anything else: 0 or -inf to add, which takes a tenth of the time of selecting."""

    bias: FloatArray

    def apply(self, row: FloatArray) -> None:
        np.add(row, self.bias, out=row)


def new_bitmask(num_tokens: int) -> NDArray[np.int32]:
    """One bit a token, in whole words."""
    return np.zeros(-(-num_tokens // WORD_BITS), dtype=np.int32)


def to_mask(bitmask: NDArray[np.int32], num_usable: int, vocab_size: int) -> Mask | None:
    """What is set of the first `num_usable` bits, for rows of `vocab_size`; None where nothing is."""
    bits = np.unpackbits(bitmask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
    bits[num_usable:] = False
    num_allowed = np.count_nonzero(bits)
    if not num_allowed:
        return None
    if num_allowed * _FEW <= vocab_size:
        return FewAllowed(np.flatnonzero(bits))
    if (vocab_size - num_allowed) * _FEW <= vocab_size:
        return FewForbidden(np.flatnonzero(~bits))
    return Mixed(np.where(bits, np.float32(0), np.float32(-np.inf)))
