"""A compiled grammar, and one sequence's place in it."""

import threading
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.guidance.tokenizer import Vocabulary
from engine.guidance.translate import readable
from engine.runners.base import FloatArray
from engine.sampling.state import Constraint
from sluice.errors import ErrorCode, SluiceError, invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher


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


NO_TOKEN = "NoExtension"
"""llguidance's word for a place where the grammar wants more, but no token gives it."""


class CompiledGrammar:
    """A grammar ready to be followed by any number of sequences.

    They share an automaton that grows as they explore it: what one has met costs the next nothing.
    """

    def __init__(self, matcher: "LLMatcher", vocabulary: Vocabulary, workers: Workers) -> None:
        """Takes a matcher at its beginning."""
        self.vocabulary = vocabulary
        self.workers = workers
        self.is_broken = False
        """A sequence met an error that may be the shared automaton's: the next had better have a new one."""
        self._matcher = matcher
        self.first = next_mask(matcher.deep_copy(), vocabulary)
        """The tokens that may come first, or the reason why none can."""

    def constraint(self) -> Constraint:
        """The beginning, for a new sequence. Takes a tenth of a millisecond at most."""
        return GrammarConstraint(self, self._matcher.deep_copy())


class GrammarConstraint:
    """The `Constraint` of one sequence.

    Its mask is worked out once for each place in the grammar, by whoever comes first: a worker after `prepare`,
    or `apply` itself. Once the grammar is complete only end-of-sequence tokens are allowed, for ever.
    """

    def __init__(self, grammar: CompiledGrammar, matcher: "LLMatcher") -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._lock = threading.Lock()  # the matcher allows one call at a time
        self._mask: Mask | str | None = grammar.first
        """Of the place reached, or the reason why there is none; None until it is worked out."""

    def prepare(self) -> None:
        if self._mask is None:
            self._grammar.workers.submit(self)

    def apply(self, row: FloatArray) -> None:
        """Raises SluiceError INVALID where the grammar has become too complex or leads nowhere."""
        self.work_out()
        if isinstance(self._mask, str):
            raise self._failure(self._mask)
        assert self._mask is not None
        self._mask.apply(row)

    def accept(self, token_id: int) -> None:
        """Raises SluiceError INTERNAL for a token that may not come here, INVALID as `apply` does."""
        with self._lock:
            is_consumed = self._matcher.consume_token(token_id)
            self._mask = None if is_consumed else self._matcher.get_error()
        if isinstance(self._mask, str):
            raise self._failure(self._mask)

    def work_out(self) -> None:
        """Bring the mask up to date; on a worker's thread or the engine's. Never raises."""
        with self._lock:
            if self._mask is not None:
                return
            try:
                self._mask = next_mask(self._matcher, self._grammar.vocabulary)
            except BaseException as error:  # a Rust panic is no Exception, and would end the worker
                self._mask = f"{type(error).__name__}: {error}"

    def _failure(self, error: str) -> SluiceError:
        if "doesn't satisfy the grammar" in error:
            message = "a token was chosen that the grammar does not allow"
            return SluiceError(ErrorCode.INTERNAL, message, param="grammar")
        self._grammar.is_broken = True
        reason = "no token of this model fits" if NO_TOKEN in error else readable(error)
        return invalid("grammar", f"the grammar cannot be followed any further: {reason}")


def next_mask(matcher: "LLMatcher", vocabulary: Vocabulary) -> Mask | str:
    """The tokens that may come next, or the reason why none can. Most of its time is without Python's lock."""
    bitmask = new_bitmask(vocabulary.tokenizer.vocab_size)
    matcher.unsafe_compute_mask_ptr(bitmask.ctypes.data, bitmask.nbytes)
    # The mask of a failed matcher allows end of sequence, so it has to be asked.
    return matcher.get_error() or to_mask(bitmask, vocabulary.num_usable, vocabulary.vocab_size) or NO_TOKEN


class Task(Protocol):
    """Something that can bring itself up to date, on any thread, at most once."""

    def work_out(self) -> None:
        """Must not raise."""
        ...


class Workers:
    """Who needs a result does not wait for a worker to come to it, but does the work there and then: a slow or
    closed pool costs time and nothing else.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: SimpleQueue[Task | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"mask-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task) -> None:
        """Returns at once."""
        self._queue.put(task)

    def close(self) -> None:
        """End the threads, after what was submitted."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            task.work_out()
