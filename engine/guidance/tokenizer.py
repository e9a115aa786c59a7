"""Loads a checkpoint's tokenizer for llguidance, which needs the bytes of every token."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sluice.errors import SluiceError, invalid

if TYPE_CHECKING:
    from llguidance import LLTokenizer

DIGITS = b"0123456789"
_METASPACE = "▁"

_CONVERT_TIMEOUT_S = 120
_CONVERT = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], local_files_only=True, trust_remote_code=False)
sys.stdout.write(tokenizer.backend_tokenizer.to_str())
"""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A tokenizer for llguidance and the size of the model's vocabulary. Masks have `tokenizer.vocab_size` bits. Rows
    of logits have `vocab_size` entries; those from `num_usable` on are padding."""

    tokenizer: "LLTokenizer"
    vocab_size: int
    num_usable: int
    leading_digits: NDArray[np.uint8]
    """Number of digits at the beginning of each token [vocab_size]."""


def load_vocabulary(model_path: Path, vocab_size: int, eos_token_ids: tuple[int, ...]) -> Vocabulary:
    """Load the tokenizer of the checkpoint in `model_path`; takes up to a second for 150,000 tokens. `vocab_size` is
    the model's, which may be more or less than the tokenizer's. Raises INVALID if the model cannot be guided: it has no
    end of sequence, or a tokenizer whose tokens have no fixed bytes."""
    from llguidance import LLTokenizer  # 40 ms and 8 MB that only guided requests need

    try:
        text = _read_tokenizer(model_path)
        original: dict[str, Any] = json.loads(text)
        document, num_tokens = _with_all_ids(_with_known_decoder(original))
        text = text if document is original else json.dumps(document)
        num_usable = min(vocab_size, num_tokens)
        eos = [token_id for token_id in eos_token_ids if token_id < num_usable]
        if not eos:
            raise _unusable("it has no end-of-sequence token, without which the output could not end")
        size = max(vocab_size, num_tokens)
        tokenizer = LLTokenizer(text, n_vocab=size, eos_token=eos)
        return Vocabulary(tokenizer, vocab_size, num_usable, _count_leading_digits(tokenizer, vocab_size, num_usable))
    except SluiceError:
        raise
    except BaseException as error:  # a Rust panic is no Exception
        raise _unusable(f"its tokenizer cannot be read: {type(error).__name__}: {error}") from error


def _count_leading_digits(tokenizer: "LLTokenizer", vocab_size: int, num_usable: int) -> NDArray[np.uint8]:
    counts = np.zeros(vocab_size, np.uint8)
    for token_id in range(num_usable):
        text = tokenizer.decode_bytes([token_id])
        counts[token_id] = min(len(text) - len(text.lstrip(DIGITS)), 255)
    return counts


def _unusable(reason: str) -> SluiceError:
    return invalid("grammar", f"guided decoding cannot be used with this model: {reason}")


def _read_tokenizer(model_path: Path) -> str:
    """Return the text of tokenizer.json. transformers creates it if the checkpoint has only older formats."""
    file = model_path / "tokenizer.json"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    # In this process transformers would take 100 MB, and half a second in which no other thread runs.
    command = (sys.executable, "-X", "utf8", "-c", _CONVERT, str(model_path))
    run = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=_CONVERT_TIMEOUT_S, check=False)
    if run.returncode != 0:
        raise ValueError((run.stderr.strip().splitlines() or ["transformers cannot load it"])[-1])
    return run.stdout


def _with_known_decoder(document: dict[str, Any]) -> dict[str, Any]:
    """Replace a single Metaspace decoder by equivalent steps that llguidance knows."""
    decoder = document.get("decoder") or {}
    if decoder.get("type") != "Metaspace":
        return document
    replace = {"type": "Replace", "pattern": {"String": decoder.get("replacement", _METASPACE)}, "content": " "}
    return {**document, "decoder": {"type": "Sequence", "decoders": [replace, {"type": "ByteFallback"}]}}


def _with_all_ids(document: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """Add a special token for each unused id, since llguidance counts tokens; return the number of ids."""
    model, added = document["model"], list(document.get("added_tokens") or [])
    vocab = model["vocab"]
    if not isinstance(vocab, dict):  # Unigram has a list, which has no gaps
        ids = set(range(len(vocab))) | {token["id"] for token in added}
        return document, max(ids) + 1
    used = {*vocab.values(), *(token["id"] for token in added)}
    gaps = {f"<|unused {token_id}|>": token_id for token_id in range(max(used) + 1) if token_id not in used}
    if not gaps:
        return document, max(used) + 1
    flags = {"special": True, **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)}
    added += [{"id": token_id, "content": name, **flags} for name, token_id in gaps.items()]
    return {**document, "added_tokens": added, "model": {**model, "vocab": {**vocab, **gaps}}}, max(used) + 1
