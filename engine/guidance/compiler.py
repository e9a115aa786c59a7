"""Grammars to automata over a model's vocabulary: compiled in the background, and kept."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from engine.guidance.matching import CompiledGrammar, Workers
from engine.guidance.tokenizer import Vocabulary, load_vocabulary
from engine.guidance.translate import translate
from engine.types import Grammar
from sluice.errors import ErrorCode, SluiceError

MAX_KEPT_GRAMMARS = 32
MAX_KEPT_BYTES = 1 << 20
"""Of grammar text. A common grammar takes a megabyte, the worst that the limits allow some tens."""

MAX_PENDING = 256
"""Grammars waiting to be compiled; one more is refused at once."""

# With the size of its expressions, what a grammar may cost. What one mask may (15 ms) is llguidance's own limit.
_MAX_SYMBOLS = 200_000
_MAX_STATES = 32_000  # of the automaton, up to 2 kB each

_NUM_COMPILING = 2
_NUM_MASK_THREADS = 2

logger = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles grammars for one model. Usable from any thread.

    The tokenizer is loaded with the first grammar, not at start.
    """

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the length of a row of logits."""
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[Grammar, Future[CompiledGrammar]] = {}
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_NUM_COMPILING, thread_name_prefix="grammar")
        self._workers = Workers(_NUM_MASK_THREADS)

    def compile(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Never blocks. The future may be shared with other requests and cannot be cancelled.

        It raises SluiceError: INVALID where the grammar cannot be used, OVERLOADED where too many wait to be
        compiled, UNAVAILABLE after `close`.
        """
        with self._lock:
            kept = self._kept.get(grammar)
            if kept is not None and not kept.is_broken:
                self._kept.move_to_end(grammar)
                return _finished(kept)
            if grammar in self._pending:
                return self._pending[grammar]
            if self._is_closed:
                return _failed(_closed())
            if len(self._pending) >= MAX_PENDING:
                message = f"{MAX_PENDING} grammars wait to be compiled already; try again"
                return _failed(SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=1.0))
            return self._start(grammar)

    def close(self) -> None:
        """Wait for what is being compiled. What still waits for its turn fails."""
        with self._lock:
            self._is_closed = True
            self._kept.clear()
        self._threads.shutdown(cancel_futures=True)
        for future in self._pending.values():
            future.set_exception(_closed())
        self._pending.clear()
        self._workers.close()

    def _start(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        future.set_running_or_notify_cancel()  # one request must not cancel another's
        self._pending[grammar] = future
        self._threads.submit(self._finish, grammar, future)
        return future

    def _finish(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        compiled: CompiledGrammar | SluiceError
        try:
            compiled = call_with_large_stack(lambda: self._compile(grammar))
        except SluiceError as error:
            compiled = error
        except BaseException:  # nothing may leave a request waiting
            logger.exception("compiling a grammar failed")
            compiled = SluiceError(ErrorCode.INTERNAL, "the grammar could not be compiled", param="grammar")
        with self._lock:
            del self._pending[grammar]
            if isinstance(compiled, CompiledGrammar):
                self._keep(grammar, compiled)
        if isinstance(compiled, CompiledGrammar):
            future.set_result(compiled)
        else:
            future.set_exception(compiled)

    def _keep(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        while len(self._kept) > MAX_KEPT_GRAMMARS or sum(len(kept.text) for kept in self._kept) > MAX_KEPT_BYTES:
            self._kept.popitem(last=False)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        translation = translate(grammar)

        def build(text: str) -> CompiledGrammar:
            return self._build(vocabulary, text, translation.fuel)

        compiled = build(translation.text)
        if isinstance(compiled.first, str):
            raise translation.explain(compiled.first, lambda text: _error(build(text)))
        return compiled

    def _build(self, vocabulary: Vocabulary, text: str, fuel: int) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=fuel,
            max_grammar_size=_MAX_SYMBOLS,
            max_lexer_states=_MAX_STATES,
            verbose_errors=False,
        )
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        return CompiledGrammar(matcher, vocabulary, self._workers)

    def _load_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._model_path, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


def _error(compiled: CompiledGrammar) -> str:
    return compiled.first if isinstance(compiled.first, str) else ""


def _finished(compiled: CompiledGrammar) -> "Future[CompiledGrammar]":
    future: Future[CompiledGrammar] = Future()
    future.set_result(compiled)
    return future


def _failed(error: SluiceError) -> "Future[CompiledGrammar]":
    future: Future[CompiledGrammar] = Future()
    future.set_exception(error)
    return future


def _closed() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "the engine is shutting down")


STACK_BYTES = 256 << 20
"""Address space, not memory. The compiler recurses along chains of references and rules, at up to 4 kB for a link of
6 bytes; an overflow would end the process."""

_size_lock = threading.Lock()  # the size of new threads' stacks is the whole process's

T = TypeVar("T")


def call_with_large_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own, whose stack's memory goes back to the system with it, and wait for it."""
    outcome: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(work, outcome), name="compile-grammar", daemon=True)
    with _size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return outcome.result()


def _run(work: Callable[[], T], outcome: "Future[T]") -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # a Rust panic is no Exception, and the waiter must hear of it
        outcome.set_exception(error)
