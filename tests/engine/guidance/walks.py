"""Outputs of random allowed tokens, as of an untrained model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.sampling.state import Constraint
from sluice.engine.types import Grammar, GrammarKind
from tests.waiting import PATIENCE_S

RILL = Path("models/rill/1")
TOKENIZER = tokenizers.Tokenizer.from_file(str(RILL / "tokenizer.json"))
VOCAB_SIZE = 4096
EOS = 5

_HURRY_AFTER = 60
_CLOSING = [TOKENIZER.token_to_id(text) for text in ('"', "}", "]", ",", ":", "0", "1", "a")]


def grammar(kind: GrammarKind, text: Any = "") -> Grammar:
    return Grammar(kind, text if isinstance(text, str) else json.dumps(text))


def allowed(constraint: Constraint, vocab_size: int = VOCAB_SIZE) -> list[int]:
    """Return the token ids whose logits the constraint does not change; the others must be -inf."""
    row = np.linspace(-5, 5, vocab_size, dtype=np.float32)
    before = row.copy()
    constraint.mask().apply(row)
    kept = row == before
    assert np.isneginf(row[~kept]).all()
    return [int(token_id) for token_id in np.flatnonzero(kept)]


def walk(constraint: Constraint, rng: np.random.Generator, max_tokens: int = 1500) -> list[int]:
    """Return random allowed tokens until the end of sequence, which is excluded. A long walk prefers to end."""
    tokens: list[int] = []
    while len(tokens) < max_tokens:
        choices = allowed(constraint)
        if len(tokens) > _HURRY_AFTER:
            choices = [token for token in (EOS, *_CLOSING) if token in set(choices)][:1] or choices
        token = int(rng.choice(choices))
        constraint.accept(token)
        if token == EOS:
            return tokens
        tokens.append(token)
        constraint.prepare()
    raise AssertionError(f"no end after {max_tokens} tokens: {TOKENIZER.decode(tokens)!r}")


def outputs(compiler: GrammarCompiler, wanted: Grammar, num_walks: int = 5, seed: int = 0) -> list[str]:
    """The texts of several random walks."""
    compiled = compiler.compile(wanted).result(timeout=PATIENCE_S)
    rng = np.random.default_rng(seed)
    return [TOKENIZER.decode(walk(compiled.constraint(), rng), skip_special_tokens=False) for _ in range(num_walks)]
