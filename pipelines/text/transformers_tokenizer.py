"""Tokenizers of transformers: loading them, and those that it has in Python only."""

import json
import logging
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from sluice.errors import ErrorCode, SluiceError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.tiktoken",
)
"""A tokenizer has at least one of these files. From config.json alone transformers would make an empty one."""

_BY_LIBRARIES = {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tokenizer.tiktoken"}
_LIBRARIES = ("sentencepiece", "tiktoken")
_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

_LOADING = Lock()
"""Serializes loading: transformers imports classes at first use, which fails where two threads do so at a time."""


def load_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a Hugging Face checkpoint directory. Raises UNAVAILABLE where it has none, and whatever the
    libraries raise that read a damaged file."""
    if not path.is_dir():
        # transformers would take the path for the name of a model to download.
        raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot load the tokenizer of {path}: it is not a directory")
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        files = ", ".join(TOKENIZER_FILES)
        raise SluiceError(ErrorCode.UNAVAILABLE, f"{path} has no tokenizer; one of these is needed: {files}")
    is_by_library = any((path / name).is_file() for name in _BY_LIBRARIES) and not (path / "tokenizer.json").is_file()
    if is_by_library and (missing := [name for name in _LIBRARIES if find_spec(name) is None]):
        message = f"the tokenizer of {path} needs {missing[0]}, which is not here: pip install 'sluice[tokenizers]'"
        raise SluiceError(ErrorCode.UNAVAILABLE, message)
    with _LOADING:
        return _transformers_loader(path)(path, local_files_only=True, trust_remote_code=False)


def _transformers_loader(path: Path) -> Callable[..., Any]:
    """Return transformers' loader for the tokenizer in `path`, imported here because that takes over half a second.
    AutoTokenizer also imports torch where it is installed (2 s and 200 MB), so it is used only for a tokenizer whose
    class it has to find."""
    log = logging.getLogger("transformers")
    log.addFilter(_is_not_torch_advice)
    try:
        if _is_generic(path):
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
    finally:
        log.removeFilter(_is_not_torch_advice)
    loader: Callable[..., Any] = Loader.from_pretrained
    return loader


def _is_generic(path: Path) -> bool:
    """Whether the tokenizer is completely described by its tokenizer.json, without a class of its own."""
    config = path / "tokenizer_config.json"
    if not ((path / "tokenizer.json").is_file() and config.is_file()):
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in _GENERIC_CLASSES


def _is_not_torch_advice(record: logging.LogRecord) -> bool:
    """Drop transformers' advice that models need PyTorch: the engine runs them without it."""
    return "PyTorch was not found" not in record.getMessage()


class _Encoding(NamedTuple):
    ids: list[int]


class SlowBackend:
    """Gives a tokenizer that transformers has in Python only the methods of a fast one's `backend_tokenizer`."""

    decoder = None
    """None: only the tokenizer itself knows how its tokens become text."""
    normalizer = None
    """None: added tokens are matched in the text as it is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> _Encoding:
        return _Encoding(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def encode_batch_fast(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[_Encoding]:
        return [self.encode(text, add_special_tokens) for text in texts]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, ignoring those that the vocabulary lacks."""
        known = [token_id for token_id in token_ids if token_id < len(self._tokenizer)]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def decode_batch(self, rows: Sequence[Sequence[int]], skip_special_tokens: bool = True) -> list[str]:
        return [self.decode(token_ids, skip_special_tokens) for token_ids in rows]

    def id_to_token(self, token_id: int) -> str | None:
        if token_id >= len(self._tokenizer):
            return None
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        return added
