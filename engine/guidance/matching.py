"""A compiled grammar, the constraint of one sequence that follows it, and the masks of allowed tokens."""

import threading
from dataclasses import dataclass
from enum import Enum
from queue import SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray, IntArray
from sluice.engine.guidance.tokenizer import DIGITS, Vocabulary
from sluice.engine.guidance.translate import reword_error
from sluice.engine.runners.base import TokenMask
from sluice.engine.sampling.state import Constraint
from sluice.errors import ErrorCode, SluiceError, invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher

NO_EXTENSION = "NoExtension"
"""llguidance's word for a state in which the grammar continues, but no token fits."""

WORD_BITS = 32

MAX_DIGITS = 20
"""Most digits of a number in JSON, before the point and after it, where the grammar allows it to end: those of the
largest unsigned integer of 64 bits, and more than a double needs."""
MAX_EXPONENT_DIGITS = 3

_QUOTE, _BACKSLASH, _SIGNS, _EXPONENTS = b'"'[0], b"\\"[0], b"+-", b"eE"
_BRACES, _LINE_BREAK = b"{}", b"\n"[0]

_FEW = 8
"""A set of at most 1/8 of the vocabulary is kept as a list of token ids."""


class JsonExtent(Enum):
    """Where a grammar's text is JSON."""

    NONE = "none"
    ALL = "all"
    BRACES = "braces"
    """Within braces alone, with any text around them."""


class CompiledGrammar:
    """A grammar that any number of sequences can follow. They share an automaton that grows as they explore it: a state
    that one has reached costs the next nothing."""

    def __init__(
        self,
        matcher: "LLMatcher",
        vocabulary: Vocabulary,
        threads: "MaskThreads",
        json: JsonExtent = JsonExtent.NONE,
    ) -> None:
        """`matcher` must be in its initial state. `json` says where numbers are JSON's, so that they get an end."""
        self.vocabulary = vocabulary
        self.json = json
        self.threads = threads
        self.is_broken = False
        """Whether a sequence met an error that may be the shared automaton's, so that it should not be reused."""
        self._matcher = matcher
        self.first = next_mask(matcher.deep_copy(), vocabulary)
        """The mask of the first token, or the reason why no token fits."""

    def constraint(self) -> Constraint:
        """Return a constraint in the initial state. Takes a tenth of a millisecond at most."""
        return GrammarConstraint(self, self._matcher.deep_copy())


class GrammarConstraint:
    """The `Constraint` of one sequence. Each state's mask is computed once, by a thread of the pool after `prepare` or
    by `mask` itself. Once the grammar is complete, only end-of-sequence tokens are allowed."""

    def __init__(self, grammar: CompiledGrammar, matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._lock = threading.Lock()  # the matcher allows one call at a time
        self._mask: TokenMask | str | None = grammar.first
        """The mask of the current state, or the reason why no token fits; None until it is computed."""
        self._digits = None if grammar.json is JsonExtent.NONE else DigitCounter(grammar.json)

    def prepare(self) -> None:
        if self._mask is None:
            self._grammar.threads.submit(self)

    def mask(self) -> TokenMask:
        """Return the mask. Raises SluiceError INVALID if the grammar has become too complex or no token fits."""
        self.compute_mask()
        if isinstance(self._mask, str):
            raise self._failure(self._mask)
        assert self._mask is not None
        return self._mask

    def accept(self, token_id: int) -> None:
        """Advance by a token. Raises SluiceError INTERNAL if the mask forbids it, INVALID as `mask` does."""
        with self._lock:
            is_consumed = self._matcher.consume_token(token_id)
            if self._digits is not None:
                self._digits.read(self._grammar.vocabulary.tokenizer.decode_bytes([token_id]))
            self._mask = None if is_consumed else self._matcher.get_error()
        if isinstance(self._mask, str):
            raise self._failure(self._mask)

    def compute_mask(self) -> None:
        """Compute the mask of the current state, unless that is done; on any thread. Never raises."""
        with self._lock:
            if self._mask is not None:
                return
            try:
                num_digits = MAX_DIGITS if self._digits is None else self._digits.num_left
                self._mask = next_mask(self._matcher, self._grammar.vocabulary, num_digits)
            except BaseException as error:  # a Rust panic is no Exception, and would end the thread
                self._mask = f"{type(error).__name__}: {error}"

    def _failure(self, error: str) -> SluiceError:
        if "doesn't satisfy the grammar" in error:
            message = "a token was chosen that the grammar does not allow"
            return SluiceError(ErrorCode.INTERNAL, message, param="grammar")
        self._grammar.is_broken = True
        reason = "no token of this model fits" if NO_EXTENSION in error else reword_error(error)
        return invalid("grammar", f"the grammar cannot be followed any further: {reason}")


class DigitCounter:
    """Counts the digits of the number that a JSON text is in, and how many more it may have. A small model writes
    digits on for as long as it may, and no rule of a grammar could tell every kind of number to end."""

    def __init__(self, json: JsonExtent = JsonExtent.ALL) -> None:
        self._is_whole = json is JsonExtent.ALL
        self._is_in_string = self._is_escaped = self._is_exponent = False
        self._num_digits = self._depth = 0

    @property
    def num_left(self) -> int:
        return max((MAX_EXPONENT_DIGITS if self._is_exponent else MAX_DIGITS) - self._num_digits, 0)

    def read(self, text: bytes) -> None:
        """Read on in the text."""
        for byte in text:
            if not self._is_whole and not self._follow_braces(byte):
                continue
            if self._is_in_string:
                self._is_in_string = self._is_escaped or byte != _QUOTE
                self._is_escaped = not self._is_escaped and byte == _BACKSLASH
            elif byte in DIGITS:
                self._num_digits += 1
            elif byte not in _SIGNS:
                self._num_digits = 0
                self._is_exponent = byte in _EXPONENTS
                self._is_in_string = byte == _QUOTE

    def _follow_braces(self, byte: int) -> bool:
        """Return whether the byte is within braces. A line break ends a string that other text seemed to begin: JSON
        has none in its strings."""
        if byte == _LINE_BREAK:
            self._is_in_string = self._is_escaped = False
        if not self._is_in_string and byte in _BRACES:
            self._depth = max(self._depth + (1 if byte == _BRACES[0] else -1), 0)
        return self._depth > 0


class MaskThreads:
    """Threads that compute masks while the engine thread waits for the forward pass. A constraint that needs its mask
    earlier computes it itself, so a slow or closed pool costs only time."""

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[GrammarConstraint | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"mask-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, constraint: GrammarConstraint) -> None:
        """Queue a constraint whose mask is to be computed. Returns at once."""
        self._queue.put(constraint)

    def close(self) -> None:
        """End the threads once they have worked off the queue."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (constraint := self._queue.get()) is not None:
            constraint.compute_mask()


# -- masks, in the form that is fastest to apply to a row of logits


@dataclass(frozen=True, slots=True)
class FewAllowed:
    """A small set of allowed tokens, as in structure: a bracket, the next letters of a key, a digit."""

    token_ids: NDArray[np.intp]

    def apply(self, row: FloatArray) -> None:
        kept = row[self.token_ids]
        row.fill(-np.inf)
        row[self.token_ids] = kept

    def pack(self, vocab_size: int) -> IntArray:
        bits = np.zeros(vocab_size, np.bool_)
        bits[self.token_ids] = True
        return _pack(bits)


@dataclass(frozen=True, slots=True)
class FewForbidden:
    """A small set of forbidden tokens, as in free text: quotes and control characters."""

    token_ids: NDArray[np.intp]

    def apply(self, row: FloatArray) -> None:
        row[self.token_ids] = -np.inf

    def pack(self, vocab_size: int) -> IntArray:
        bits = np.ones(vocab_size, np.bool_)
        bits[self.token_ids] = False
        return _pack(bits)


@dataclass(frozen=True, slots=True)
class Mixed:
    """Any other set: a bias of 0 or -inf, because adding takes a tenth of the time of selecting."""

    bias: FloatArray

    def apply(self, row: FloatArray) -> None:
        np.add(row, self.bias, out=row)

    def pack(self, vocab_size: int) -> IntArray:
        return _pack(self.bias == 0)


def _pack(bits: NDArray[np.bool_]) -> IntArray:
    """Return the bitmask of `bits` [vocab_size], in whole words."""
    words = new_bitmask(len(bits))
    packed = np.packbits(bits, bitorder="little")
    words.view(np.uint8)[: len(packed)] = packed
    return words


def next_mask(matcher: "LLMatcher", vocabulary: Vocabulary, num_digits: int = MAX_DIGITS) -> TokenMask | str:
    """Return the mask of the next token, or the reason why none fits. It mostly runs without Python's lock. No token
    begins with more than `num_digits` digits, unless all that fit do."""
    bitmask = new_bitmask(vocabulary.tokenizer.vocab_size)
    matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
    # The mask of a failed matcher allows end of sequence, so errors must be checked first.
    if error := matcher.get_error():
        return error
    too_long = vocabulary.leading_digits > num_digits if num_digits < MAX_DIGITS else None
    return to_mask(bitmask, vocabulary.num_usable, vocabulary.vocab_size, too_long) or NO_EXTENSION


def new_bitmask(num_tokens: int) -> IntArray:
    """Return an empty bitmask of one bit a token, in whole words."""
    return np.zeros(-(-num_tokens // WORD_BITS), dtype=np.int32)


def to_mask(
    bitmask: IntArray, num_usable: int, vocab_size: int, unwanted: NDArray[np.bool_] | None = None
) -> TokenMask | None:
    """Return the mask of the set bits among the first `num_usable`, for rows of `vocab_size`; None without any. Those
    of `unwanted` [vocab_size] count only where no others are set."""
    bits = np.unpackbits(bitmask.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
    bits[num_usable:] = False
    if unwanted is not None and (bits & ~unwanted).any():
        bits &= ~unwanted
    num_allowed = np.count_nonzero(bits)
    if not num_allowed:
        return None
    if num_allowed * _FEW <= vocab_size:
        return FewAllowed(np.flatnonzero(bits))
    if (vocab_size - num_allowed) * _FEW <= vocab_size:
        return FewForbidden(np.flatnonzero(~bits))
    return Mixed(np.where(bits, np.float32(0), np.float32(-np.inf)))
