"""A compiled grammar, and one sequence's place in it."""

import threading
from typing import TYPE_CHECKING

from engine.guidance.masks import Mask, new_bitmask, to_mask
from engine.guidance.messages import readable
from engine.guidance.tokenizer import Vocabulary
from engine.guidance.workers import Workers
from engine.runners.base import FloatArray
from engine.sampling.constraint import Constraint
from sluice.errors import ErrorCode, SluiceError, invalid

if TYPE_CHECKING:
    from llguidance import LLMatcher

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
