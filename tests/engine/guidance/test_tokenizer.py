"""Every kind of tokenizer that checkpoints come with."""

from pathlib import Path
from typing import Any

import pytest

from sluice.engine.guidance.compiler import GrammarCompiler
from sluice.engine.types import GrammarKind
from tests.engine.guidance.tiny import BYTE_LEVEL, special, write
from tests.engine.guidance.walks import allowed, grammar

METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}
LLAMA = {
    "type": "Sequence",
    "decoders": [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ],
}
PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "▁hi", "é"]
EOS = 2


def follows(folder: Path, vocab_size: int, eos: int, pattern: str) -> list[int]:
    compiler = GrammarCompiler(folder, vocab_size, (eos,))
    try:
        compiled = compiler.compile(grammar(GrammarKind.REGEX, pattern)).result(timeout=60)
        return allowed(compiled.constraint(), vocab_size)
    finally:
        compiler.close()


@pytest.mark.parametrize("decoder", [LLAMA, METASPACE], ids=["llama", "metaspace"])
def test_sentencepiece_with_byte_fallback(tmp_path: Path, decoder: dict[str, Any]) -> None:
    added = [special(number, PIECES[number]) for number in range(3)]
    model = {"type": "Unigram", "unk_id": 0, "byte_fallback": True, "vocab": [[piece, -1.0] for piece in PIECES]}
    write(tmp_path, model, decoder, METASPACE, added)
    texts = {PIECES[token] for token in follows(tmp_path, len(PIECES), EOS, "( hi|é|x)+")}
    assert texts == {"▁", "▁hi", "é", "<0x20>", "<0xC3>", "<0x78>"}


def test_ids_with_gaps(tmp_path: Path) -> None:
    """The id of the end of sequence is beyond the number of tokens."""
    vocab = {"a": 0, "b": 1, "ab": 4, "<|end|>": 9}
    write(
        tmp_path,
        {"type": "BPE", "vocab": vocab, "merges": [["a", "b"]]},
        BYTE_LEVEL,
        BYTE_LEVEL,
        [special(9, "<|end|>")],
    )
    assert follows(tmp_path, 12, 9, "(ab|b)*") == [0, 1, 4, 9]


@pytest.mark.slow
def test_without_a_tokenizer_json(tmp_path: Path) -> None:
    """transformers makes a tokenizer from the older files."""
    alphabet = [chr(code) for code in range(ord("!"), ord("~") + 1)] + ["Ġ"]
    tokens = [*alphabet, "hi", "<|endoftext|>"]
    vocabulary = ", ".join(f"{_quoted(token)}: {number}" for number, token in enumerate(tokens))
    (tmp_path / "vocab.json").write_text(f"{{{vocabulary}}}", encoding="utf-8")
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh i\n")
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    eos = tokens.index("<|endoftext|>")
    assert {tokens[token] for token in follows(tmp_path, len(tokens), eos, "(hi)?")} == {"hi", "h", "<|endoftext|>"}


def _quoted(token: str) -> str:
    escaped = token.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
