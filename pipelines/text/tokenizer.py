"""Text and conversations to token ids, just as transformers makes them."""

import asyncio
import json
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, TypeVar

import jinja2
import tokenizers

from pipelines.text.detokenizer import Detokenizer, detokenizer_factory
from pipelines.text.slow import SlowBackend, SlowDetokenizer
from pipelines.text.spelling import TokenTexts
from pipelines.text.types import ChatMessage
from sluice.errors import ErrorCode, SluiceError, invalid

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
"""The roles that a message may have, and under which name the chat template sees them."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.tiktoken",
)
"""Any of them is one. Without, transformers makes an empty tokenizer of config.json alone."""

_GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")

INLINE_CHARS = 4000
"""Up to here (under a millisecond) text is tokenized at once; longer text goes to a worker thread."""

_NUM_WORKERS = 2

_LOADING = Lock()
"""transformers imports its classes when they are first asked for, which fails where two threads do so at a time."""

T = TypeVar("T")


class Tokenizer:
    """A model's tokenizer and chat template.

    Control tokens that stand in the text of a prompt or message (`<|end|>`) become those tokens, as they do
    in transformers and in servers built on it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """Takes a tokenizer of transformers. Raises ValueError where its text cannot be streamed."""
        self._tokenizer = tokenizer
        self._backend: Any
        self._new_detokenizer: Callable[[], Detokenizer]
        self._backend, self._new_detokenizer = _fast(tokenizer) if tokenizer.is_fast else _slow(tokenizer)
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="tokenize")

    @classmethod
    def load(cls, path: Path) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face checkpoint directory; takes most of a second.

        Raises SluiceError UNAVAILABLE where there is none that can be used.
        """
        if not path.is_dir():
            # transformers would take it for the name of a model to download.
            raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot load the tokenizer of {path}: it is not a directory")
        if not any((path / name).is_file() for name in TOKENIZER_FILES):
            files = ", ".join(TOKENIZER_FILES)
            raise SluiceError(ErrorCode.UNAVAILABLE, f"{path} has no tokenizer; one of these is needed: {files}")
        try:
            with _LOADING:
                return cls(_transformers_loader(path)(path, local_files_only=True, trust_remote_code=False))
        except Exception as error:  # a damaged file can raise anything in the libraries that read it
            reason = f"{type(error).__name__}: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot load the tokenizer of {path}: {reason}") from error

    @property
    def eos_token_id(self) -> int | None:
        """The tokenizer's own end of sequence, which for chat models ends a turn."""
        token_id: int | None = self._tokenizer.eos_token_id
        return token_id

    @property
    def pad_token_id(self) -> int | None:
        """What fills shorter sequences up."""
        token_id: int | None = self._tokenizer.pad_token_id
        return token_id

    @property
    def num_tokens(self) -> int:
        """The size of the vocabulary, added tokens too."""
        return len(self._tokenizer)

    @property
    def added_tokens(self) -> list[Any]:
        """Tokens that are found in a text before any other: `content`, `special`, `normalized` say which and how."""
        return list(self._backend.get_added_tokens_decoder().values())

    @property
    def normalizer(self) -> Any:
        """What a text goes through before tokens are sought in it; None for nothing."""
        return self._backend.normalizer

    def detokenizer(self) -> Detokenizer:
        """A new one, for one sequence."""
        return self._new_detokenizer()

    @cached_property
    def token_texts(self) -> TokenTexts:
        """What single tokens stand for."""
        return TokenTexts(self._backend)

    def encode(self, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a text, however long, at once. `param` is the field that errors name."""
        try:
            ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except TypeError:  # what the library makes of lone surrogates
            raise invalid(param, f"{param} is not valid Unicode text: it has half a surrogate pair") from None
        return ids

    def encode_words(self, text: str, param: str) -> list[int]:
        """Token ids of a piece of text, without special tokens. `param` is the field that errors name."""
        return self.encode(text, param, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence; ids that the vocabulary lacks have none."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    async def encode_text(self, text: str) -> list[int]:
        """Token ids of plain text, with the special tokens that the tokenizer adds to it."""
        return await self._run(len(text), lambda: self.encode(text, "prompt", add_special_tokens=True))

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Token ids of a conversation, up to where the assistant's answer begins.

        Raises SluiceError INVALID for no messages, a role not in `ROLES`, what the model's template refuses,
        and for a model without a template.
        """
        turns = _turns(messages)
        num_chars = sum(len(message.content) for message in messages)
        return await self._run(num_chars, lambda: self._encode_turns(turns))

    async def _run(self, num_chars: int, work: Callable[[], T]) -> T:
        if num_chars <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def _encode_turns(self, turns: list[dict[str, str]]) -> list[int]:
        # The template writes the special tokens itself.
        return self.encode(self._render(turns), "messages", add_special_tokens=False)

    def _render(self, turns: list[dict[str, str]]) -> str:
        if self._tokenizer.chat_template is None:
            message = "this model has no chat template: use completions, or add a chat_template to its directory"
            raise invalid("messages", message)
        try:
            text: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise invalid("messages", f"the model's chat template refuses these messages: {error}") from error
        return text


def _fast(tokenizer: Any) -> tuple[tokenizers.Tokenizer, Callable[[], Detokenizer]]:
    backend: tokenizers.Tokenizer = tokenizer.backend_tokenizer
    # transformers does this on each call, which no other thread's call would survive.
    backend.no_truncation()
    backend.no_padding()
    return backend, detokenizer_factory(backend)


def _slow(tokenizer: Any) -> tuple[Any, Callable[[], Detokenizer]]:
    """For those that transformers has in Python only; each piece of text is asked of the tokenizer itself."""
    backend = SlowBackend(tokenizer)
    return backend, lambda: SlowDetokenizer(backend)


def _turns(messages: Sequence[ChatMessage]) -> list[dict[str, str]]:
    if not messages:
        raise invalid("messages", "messages is empty; at least one message is needed")
    for index, message in enumerate(messages):
        if message.role not in ROLES:
            allowed = ", ".join(ROLES)
            raise invalid("messages", f"messages[{index}].role is {message.role!r}; allowed are {allowed}")
    return [{"role": ROLES[message.role], "content": message.content} for message in messages]


def _transformers_loader(path: Path) -> Callable[..., Any]:
    """transformers' loader of the tokenizer in `path`. Imported when needed, as that alone takes over half a second.

    AutoTokenizer imports torch too where it is installed (2 s and 200 MB), so it is asked only for a
    tokenizer whose class it has to find.
    """
    log = logging.getLogger("transformers")
    log.addFilter(_is_not_about_torch)
    try:
        if _is_generic(path):
            from transformers import PreTrainedTokenizerFast as Loader
        else:
            from transformers import AutoTokenizer as Loader
    finally:
        log.removeFilter(_is_not_about_torch)
    loader: Callable[..., Any] = Loader.from_pretrained
    return loader


def _is_generic(path: Path) -> bool:
    """Whether the tokenizer is all in its tokenizer.json, of no model's own class."""
    config = path / "tokenizer_config.json"
    if not ((path / "tokenizer.json").is_file() and config.is_file()):
        return False
    return json.loads(config.read_text()).get("tokenizer_class") in _GENERIC_CLASSES


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    """Its advice that models need PyTorch is not for our users: the engine runs them without."""
    return "PyTorch was not found" not in record.getMessage()
