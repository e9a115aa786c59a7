"""The tokenizer, as far as the stand-in has one."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TokenizerBase:
    """The tokenizer that sampling parameters and results need."""

    eos_token_id: int | None = None
    pad_token_id: int | None = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        raise NotImplementedError

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        raise NotImplementedError


class TransformersTokenizer(TokenizerBase):
    """A folder's tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        path = folder / "tokenizer_config.json"
        told = json.loads(path.read_text()) if path.is_file() else {}
        self.eos_token_id = self._id_of(told.get("eos_token"))
        self.pad_token_id = self._id_of(told.get("pad_token"))

    def _id_of(self, token: Any) -> int | None:
        text = token.get("content") if isinstance(token, dict) else token
        found: int | None = None if text is None else self._tokenizer.token_to_id(text)
        return found

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(given: Any, model: Path) -> TokenizerBase | None:
    """Return None where the folder has no tokenizer that can be read; the real one only warns then, too."""
    if isinstance(given, TokenizerBase):
        return given
    folder = Path(given) if given is not None else model
    return TransformersTokenizer(folder) if (folder / "tokenizer.json").is_file() else None
