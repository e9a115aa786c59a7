"""The cost of guided decoding: the time to compile a schema, and the time of a step's token masks."""

import itertools
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.figures import BenchmarkError, Figure
from sluice.engine.arrays import FloatArray
from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.guidance.matching import CompiledGrammar
from sluice.engine.sampling.state import Constraint
from sluice.engine.types import Grammar, GrammarKind

NUM_SEQUENCES = 64
NUM_STEPS = 50
EOS = 256
VOCABULARIES = (4096, 151936)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "role": {"enum": ["admin", "editor", "reader"]},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 8},
        "address": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["city", "zip"],
        },
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age", "role", "tags", "address", "note"],
    "additionalProperties": False,
}


def measure(num_repeats: int, num_steps: int = NUM_STEPS, vocabularies: tuple[int, ...] = VOCABULARIES) -> list[Figure]:
    """Measure compile times and the masks of a step, for a small and a large synthetic vocabulary."""
    runs = {size: [_measure_one(size, num_steps) for _ in range(num_repeats)] for size in vocabularies}
    return [
        Figure(name, f"vocabulary {size:,}", "ms", tuple(run[name] for run in runs[size]))
        for size in vocabularies
        for name in runs[size][0]
    ]


def _measure_one(vocab_size: int, num_steps: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder), vocab_size)
        compiler = GrammarCompiler(Path(folder), vocab_size, (EOS,))
        try:
            return _compile_times(compiler) | _mask_times(_compiled(compiler, 1), vocab_size, num_steps)
        finally:
            compiler.close()


def _compile_times(compiler: GrammarCompiler) -> dict[str, float]:
    return {
        "first grammar (loads the tokenizer)": _ms(lambda: _compiled(compiler, 0)),
        "compile a schema": _ms(lambda: _compiled(compiler, 1)),
        "compile a schema, kept": _ms(lambda: _compiled(compiler, 1)),
    }


def _compiled(compiler: GrammarCompiler, number: int) -> CompiledGrammar:
    """Compile the schema with a title of its own, so that it is not found in the cache."""
    return compiler.compile(Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"title": str(number), **SCHEMA}))).result()


def _ms(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e3


def _mask_times(grammar: CompiledGrammar, vocab_size: int, num_steps: int) -> dict[str, float]:
    """Measure the masks of all sequences of a step: their computation, and what is left to do in the step itself."""
    constraints = [grammar.constraint() for _ in range(NUM_SEQUENCES)]
    rows, rng = np.zeros((NUM_SEQUENCES, vocab_size), np.float32), np.random.default_rng(0)
    times = []
    for _ in range(num_steps):
        rows.fill(0.0)
        times.append((_ms(partial(_each, constraints, "compute_mask")), _ms(partial(_apply, constraints, rows))))
        pairs = zip(constraints, rows, strict=True)
        constraints = [_advance(constraint, row, rng) or grammar.constraint() for constraint, row in pairs]
    worked_out, applied = np.median(times, axis=0)
    prepared = _ms(partial(_each, constraints, "prepare"))
    return {
        "masks of 64 sequences, in the background": float(worked_out),
        "masks of 64 sequences, in the step": float(applied) + prepared,
    }


def _each(constraints: list[Constraint], method: str) -> None:
    for constraint in constraints:
        getattr(constraint, method)()


def _apply(constraints: list[Constraint], rows: FloatArray) -> None:
    for constraint, row in zip(constraints, rows, strict=True):
        constraint.mask().apply(row)


def _advance(constraint: Constraint, row: FloatArray, rng: np.random.Generator) -> Constraint | None:
    """Accept a random allowed token. Returns None where it ends the sequence."""
    token = int(rng.choice(np.flatnonzero(row == 0)))
    if token == EOS:
        return None
    constraint.accept(token)
    return constraint


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Write a byte-level BPE of single bytes, an end of sequence, and words of syllables with and without a space."""
    letters = _byte_letters()
    vocab = {letter: number for number, letter in enumerate(letters)} | {"<|end|>": EOS}
    merges: list[list[str]] = []
    for left, right in _pairs():
        if len(vocab) >= vocab_size:
            break
        if left + right not in vocab:
            vocab[left + right] = len(vocab)
            merges.append([left, right])
    if len(vocab) != vocab_size:
        raise BenchmarkError(f"the synthetic vocabulary ends at {len(vocab)} tokens")
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0",
        "added_tokens": [{"id": EOS, "content": "<|end|>", "special": True, **flags}],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocab, "merges": merges},
    }
    (folder / "tokenizer.json").write_text(json.dumps(document))


def _byte_letters() -> list[str]:
    """Return the letter that stands for each byte in byte-level BPE."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _pairs() -> "itertools.chain[tuple[str, str]]":
    """Return the merges, in an order in which both halves are tokens already."""
    space = "Ġ"
    syllables = [(consonant, vowel) for consonant in "bcdfghjklmnpqrstvwxyz" for vowel in "aeiou"]
    joined = [consonant + vowel for consonant, vowel in syllables]
    punctuation = [(first, second) for first in '"{}[]:,' for second in '"{}[]:,']
    words = [left + right for left in joined for right in joined]
    return itertools.chain(
        punctuation,
        syllables,
        ((space, syllable) for syllable in joined),
        ((left, right) for left in joined for right in joined),
        ((space + left, right) for left in joined for right in joined),
        ((word, syllable) for syllable in joined for word in words),
    )
