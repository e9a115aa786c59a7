import subprocess
import sys
import threading
from pathlib import Path

import pytest

from sluice.engine.guidance import compiler
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.matching import CompiledGrammar
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError
from tests.engine.guidance.walks import EOS, RILL, VOCAB_SIZE, grammar
from tests.waiting import PATIENCE_S


class CountingCompiler(GrammarCompiler):
    """Counts compilations, each of which waits for a gate."""

    def __init__(self) -> None:
        super().__init__(RILL, VOCAB_SIZE, (EOS,))
        self.compiled: list[str] = []
        self.gate = threading.Event()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        self.compiled.append(grammar.text)
        assert self.gate.wait(PATIENCE_S)
        return super()._compile(grammar)


def regex(text: str) -> Grammar:
    return grammar(GrammarKind.REGEX, text)


def test_is_compiled_once_for_all_who_ask() -> None:
    counting = CountingCompiler()
    together = [counting.compile(regex("a")) for _ in range(5)]
    assert not any(future.done() for future in together)
    counting.gate.set()
    first = together[0].result(timeout=PATIENCE_S)
    assert all(future.result(timeout=PATIENCE_S) is first for future in together)
    assert counting.compile(Grammar(GrammarKind.REGEX, "a")).result(timeout=0) is first
    assert counting.compile(grammar(GrammarKind.CHOICE, ["a"])).result(timeout=PATIENCE_S) is not first
    assert counting.compiled == ["a", '["a"]']
    counting.close()


def test_one_request_cannot_cancel_anothers() -> None:
    counting = CountingCompiler()
    assert not counting.compile(regex("a")).cancel()
    counting.gate.set()
    assert counting.compile(regex("a")).result(timeout=PATIENCE_S) is not None
    counting.close()


def test_a_refusal_is_not_kept() -> None:
    counting = CountingCompiler()
    counting.gate.set()
    for _ in range(2):
        with pytest.raises(SluiceError):
            counting.compile(regex("a(")).result(timeout=PATIENCE_S)
    assert counting.compiled == ["a(", "a("]
    counting.close()


def test_the_least_recently_used_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED_GRAMMARS", 2)
    counting = CountingCompiler()
    counting.gate.set()
    for text in ("a", "b", "a", "c", "a", "b"):
        counting.compile(regex(text)).result(timeout=PATIENCE_S)
    assert counting.compiled == ["a", "b", "c", "b"]
    counting.close()


def test_long_texts_go_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_CACHED_BYTES", 10)
    counting = CountingCompiler()
    counting.gate.set()
    for text in ("aaaaaa", "b", "cccccc", "aaaaaa"):
        counting.compile(regex(text)).result(timeout=PATIENCE_S)
    assert counting.compiled == ["aaaaaa", "b", "cccccc", "aaaaaa"]
    counting.close()


def test_too_many_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_PENDING", 2)
    counting = CountingCompiler()
    accepted = [counting.compile(regex(text)) for text in "ab"]
    with pytest.raises(SluiceError) as caught:
        counting.compile(regex("c")).result(timeout=0)
    assert caught.value.code is ErrorCode.OVERLOADED
    counting.gate.set()
    assert all(future.result(timeout=PATIENCE_S) for future in accepted)
    counting.close()


def test_close_leaves_nobody_waiting() -> None:
    counting = CountingCompiler()
    futures = [counting.compile(regex(text)) for text in "abcd"]
    counting.gate.set()
    counting.close()
    for future in (*futures, counting.compile(regex("late"))):
        error = future.exception(timeout=0)
        assert error is None or (isinstance(error, SluiceError) and error.code is ErrorCode.UNAVAILABLE)


def test_nothing_is_loaded_before_the_first_grammar() -> None:
    program = f"""
import sys
from pathlib import Path
from sluice.engine.guidance.compiler import GrammarCompiler
compiler = GrammarCompiler(Path({str(Path.cwd() / RILL)!r}), {VOCAB_SIZE}, ({EOS},))
compiler.close()
print("llguidance" in sys.modules, "transformers" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_a_model_that_cannot_be_guided(tmp_path: Path) -> None:
    for path, eos, words in ((tmp_path, (EOS,), "its tokenizer cannot be read"), (RILL, (), "no end-of-sequence")):
        hopeless = GrammarCompiler(path, VOCAB_SIZE, eos)
        with pytest.raises(SluiceError, match=words) as caught:
            hopeless.compile(regex("a")).result(timeout=60)
        assert caught.value.param == "grammar"
        hopeless.close()
