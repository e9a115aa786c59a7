"""Grammars compiled over rill's own tokenizer."""

from collections.abc import Iterator

import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from tests.engine.guidance.walks import EOS, RILL, VOCAB_SIZE


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(RILL, VOCAB_SIZE, (EOS,))
    yield compiler
    compiler.close()
