"""Tokenizers with a few tokens."""

import json
from pathlib import Path
from typing import Any

TOKENS = ["a", "b", "c", "1", "2", "{", '"', "<|end|>", "ab", "bc", "ca", "12", "22", "<|pad|>"]
TINY_EOS = TOKENS.index("<|end|>")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def write_tiny(folder: Path) -> None:
    """A byte-level BPE of `TOKENS`."""
    merges = [[token[0], token[1]] for token in TOKENS if len(token) == 2]
    vocab = {token: token_id for token_id, token in enumerate(TOKENS)}
    specials = [special(vocab[token], token) for token in TOKENS if token.startswith("<|")]
    write(folder, {"type": "BPE", "vocab": vocab, "merges": merges}, BYTE_LEVEL, BYTE_LEVEL, specials)


def special(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, "special": True, **flags}


def write(
    folder: Path, model: dict[str, Any], decoder: dict[str, Any], splitter: dict[str, Any], added: list[dict[str, Any]]
) -> None:
    parts = {"version": "1.0", "added_tokens": added, "pre_tokenizer": splitter, "decoder": decoder, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(parts))
