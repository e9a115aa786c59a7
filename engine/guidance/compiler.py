"""Compiles grammars to automata over a model's vocabulary, in the background, and caches them."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from sluice.engine.guidance.matching import CompiledGrammar, JsonExtent, MaskThreads
from sluice.engine.guidance.tokenizer import Vocabulary, load_vocabulary
from sluice.engine.guidance.translate import translate
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError

MAX_CACHED_GRAMMARS = 32
MAX_CACHED_BYTES = 4 << 20
"""Most bytes of grammar text in the cache. A common grammar takes a megabyte of memory, the worst allowed some tens."""

MAX_PENDING = 256
"""Most grammars waiting to be compiled; one more is rejected at once."""

# These and the fuel bound what a grammar may cost. llguidance itself limits one mask to 15 ms.
MAX_SYMBOLS = 65_000  # llguidance counts them in 16 bits
MAX_STATES = 32_000  # of the automaton, up to 2 kB each

STACK_BYTES = 256 << 20
"""Stack size of the compiling thread: address space, not memory. The compiler recurses along chains of references and
rules, with up to 4 kB for a link of 6 bytes, and an overflow would end the process."""

_JSON_KINDS = (GrammarKind.JSON_SCHEMA, GrammarKind.JSON_OBJECT)
_NUM_COMPILING = 2
_NUM_MASK_THREADS = 2

logger = logging.getLogger(__name__)

_stack_size_lock = threading.Lock()  # the stack size of new threads is a setting of the whole process

T = TypeVar("T")


class GrammarCompiler:
    """Compiles grammars for one model. Usable from any thread. The tokenizer is loaded with the first grammar."""

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """`vocab_size` is the length of a row of logits."""
        self._model_path = model_path
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._vocabulary: Vocabulary | None = None
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[Grammar, Future[CompiledGrammar]] = {}
        self._cache: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._is_closed = False
        self._threads = ThreadPoolExecutor(_NUM_COMPILING, thread_name_prefix="grammar")
        self._mask_threads = MaskThreads(_NUM_MASK_THREADS)

    def compile(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Return a future of the compiled grammar, perhaps shared, not to be cancelled. Never blocks. The future raises
        INVALID if the grammar cannot be used, OVERLOADED if too many wait to be compiled, UNAVAILABLE after `close`."""
        with self._lock:
            cached = self._cache.get(grammar)
            if cached is not None and not cached.is_broken:
                self._cache.move_to_end(grammar)
                finished: Future[CompiledGrammar] = Future()
                finished.set_result(cached)
                return finished
            if grammar in self._pending:
                return self._pending[grammar]
            if self._is_closed:
                return _failed(_closed())
            if len(self._pending) >= MAX_PENDING:
                message = f"{MAX_PENDING} grammars wait to be compiled already; try again"
                return _failed(SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=1.0))
            return self._start(grammar)

    def close(self) -> None:
        """Wait for the grammars that are being compiled, and fail those that still wait."""
        with self._lock:
            self._is_closed = True
            self._cache.clear()
        self._threads.shutdown(cancel_futures=True)
        for future in self._pending.values():
            future.set_exception(_closed())
        self._pending.clear()
        self._mask_threads.close()

    def _start(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        future: Future[CompiledGrammar] = Future()
        future.set_running_or_notify_cancel()  # no request may cancel another's
        self._pending[grammar] = future
        self._threads.submit(self._compile_into, grammar, future)
        return future

    def _compile_into(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
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
                self._add_to_cache(grammar, compiled)
        if isinstance(compiled, CompiledGrammar):
            future.set_result(compiled)
        else:
            future.set_exception(compiled)

    def _add_to_cache(self, grammar: Grammar, compiled: CompiledGrammar) -> None:
        self._cache[grammar] = compiled
        self._cache.move_to_end(grammar)
        while (
            len(self._cache) > MAX_CACHED_GRAMMARS or sum(len(cached.text) for cached in self._cache) > MAX_CACHED_BYTES
        ):
            self._cache.popitem(last=False)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._load_vocabulary()
        translation = translate(grammar)

        def build(text: str) -> CompiledGrammar:
            return self._build(vocabulary, text, translation.fuel, _json_extent(grammar))

        compiled = build(translation.text)
        if isinstance(compiled.first, str):
            raise translation.explain(compiled.first, lambda text: _error(build(text)))
        return compiled

    def _build(self, vocabulary: Vocabulary, text: str, fuel: int, json: JsonExtent) -> CompiledGrammar:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(
            initial_lexer_fuel=fuel, max_grammar_size=MAX_SYMBOLS, max_lexer_states=MAX_STATES, verbose_errors=False
        )
        matcher = LLMatcher(vocabulary.tokenizer, text, log_level=0, limits=limits)
        return CompiledGrammar(matcher, vocabulary, self._mask_threads, json)

    def _load_vocabulary(self) -> Vocabulary:
        with self._vocabulary_lock:
            if self._vocabulary is None:
                self._vocabulary = load_vocabulary(self._model_path, self._vocab_size, self._eos_token_ids)
            return self._vocabulary


def _json_extent(grammar: Grammar) -> JsonExtent:
    """Return how much of the text that matches a grammar is JSON."""
    if grammar.kind is GrammarKind.TOOL_CALLS or (grammar.kind in _JSON_KINDS and grammar.preamble):
        return JsonExtent.BRACES
    return JsonExtent.ALL if grammar.kind in _JSON_KINDS else JsonExtent.NONE


def _error(compiled: CompiledGrammar) -> str:
    return compiled.first if isinstance(compiled.first, str) else ""


def _failed(error: SluiceError) -> "Future[CompiledGrammar]":
    future: Future[CompiledGrammar] = Future()
    future.set_exception(error)
    return future


def _closed() -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, "the engine is shutting down")


def call_with_large_stack(work: Callable[[], T]) -> T:
    """Run `work` on a thread of its own and wait for it. The stack's memory is freed with the thread."""
    outcome: Future[T] = Future()
    thread = threading.Thread(target=_run, args=(work, outcome), name="compile-grammar", daemon=True)
    with _stack_size_lock:
        before = threading.stack_size(STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return outcome.result()


def _run(work: Callable[[], T], outcome: "Future[T]") -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # a Rust panic is no Exception, and the waiter must get it
        outcome.set_exception(error)
