"""Counts a language model's tokens, and keeps documents from producing its control tokens (`<|end|>`).

A document that could end its own turn and begin another one would speak with the voice of the user or the system.
"""

import asyncio
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.text.tokenizer import INLINE_CHARS, Tokenizer
from sluice.pipelines.text.types import ChatMessage

_TOKENS_PER_MESSAGE = 8
"""Most tokens that chat templates put around a message; most of them put 3 to 5."""
_NUM_CACHED = 2048
"""Texts whose counts are cached, a few megabytes: popular chunks come up often, and nothing else here takes as long."""
_MARKUP = re.compile(r"<.+>|\[.+\]", re.DOTALL)
"""Matches added tokens like <think> and [TOOL_CALLS], which steer a model even if they are not marked as special."""
COMMON_CONTROL_TOKENS = re.compile(
    r"<\|[^|<>\n]{1,40}\|>|</?s>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS)\]|<</?SYS>>"
    r"|<(?:start|end)_of_turn>|<(?:bos|eos|pad)>|</?(?:think|tool_call|tool_response)>"
)
"""Matches control tokens of well-known chat models, for a model whose tokenizer is not available."""


class PromptTokens(ABC):
    """Counts the tokens of one language model."""

    def __init__(self, control_tokens: "ControlTokens") -> None:
        self._control_tokens = control_tokens

    def escape(self, text: str) -> str:
        """Return the text without the model's control tokens."""
        return self._control_tokens.escape(text)

    @abstractmethod
    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        """Count the tokens of a rendered conversation. Raises SluiceError INVALID if the chat template rejects it."""

    @abstractmethod
    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of each text by itself."""

    async def count_turns(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Return the most tokens that each message adds to a conversation."""
        counts = await self.count_texts([message.content for message in messages])
        return [count + _TOKENS_PER_MESSAGE for count in counts]


class TokenizerTokens(PromptTokens):
    """Counts exactly, with the model's tokenizer and chat template. Without a template it counts what one would add."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(ControlTokens.of(tokenizer))
        self._tokenizer = tokenizer
        self._count_text = lru_cache(_NUM_CACHED)(lambda text: len(tokenizer.encode_words(text, "context")))
        self._has_template: bool | None = None

    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        if self._has_template is None:
            self._has_template = await self._renders(ChatMessage("user", "?"))
        if not self._has_template:
            return sum(await self.count_turns(messages))
        return len(await self._tokenizer.encode_chat(messages))

    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        def count() -> list[int]:
            return [self._count_text(text) for text in texts]

        return count() if sum(map(len, texts)) <= INLINE_CHARS else await asyncio.to_thread(count)

    async def _renders(self, *messages: ChatMessage) -> bool:
        try:
            await self._tokenizer.encode_chat(messages)
        except SluiceError as error:
            if error.code is not ErrorCode.INVALID:
                raise
            return False
        return True


class EstimatedTokens(PromptTokens):
    """Estimates counts for a model whose tokenizer is not available.

    One token stands for `chars_per_token` ASCII characters, or for one other character.
    """

    def __init__(self, chars_per_token: float) -> None:
        super().__init__(ControlTokens(COMMON_CONTROL_TOKENS))
        self._chars_per_token = chars_per_token

    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        return sum(await self.count_turns(messages))

    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        return [self._count(text) for text in texts]

    def _count(self, text: str) -> int:
        num_ascii = len(text.encode("ascii", "ignore"))
        return math.ceil(num_ascii / self._chars_per_token) + len(text) - num_ascii


class ControlTokens:
    """Finds and breaks a model's control tokens in texts. Cheap for a text without any, as nearly all are."""

    def __init__(self, pattern: re.Pattern[str] | None, normalizer: Any = None) -> None:
        """`normalizer` is the tokenizer's, given if the tokenizer looks for control tokens in normalized text."""
        self._pattern = pattern
        self._normalizer = normalizer

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "ControlTokens":
        """Build the control tokens that `tokenizer` would find in a text."""
        added = [token for token in tokenizer.added_tokens if _steers(token)]
        is_normalized = any(token.normalized for token in added)
        return cls(
            _any_of(token.content for token in added), tokenizer.library_tokenizer.normalizer if is_normalized else None
        )

    def escape(self, text: str) -> str:
        """Put a space after the first character of each control token: it reads the same, and is no token any more."""
        if self._pattern is None:
            return text
        if self._normalizer is not None:
            normal = self._normalizer.normalize_str(text)
            text = normal if self._pattern.search(normal) else text
        # Repeated, since a token may stand between the halves of another one.
        while self._pattern.search(text):
            text = self._pattern.sub(_break, text)
        return text


def _steers(token: Any) -> bool:
    return bool(token.content.strip()) and (token.special or _MARKUP.fullmatch(token.content) is not None)


def _any_of(contents: Iterable[str]) -> re.Pattern[str] | None:
    ordered = sorted(contents, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered))) if ordered else None


def _break(match: re.Match[str]) -> str:
    token = match.group()
    return f"{token[0]} {token[1:]}" if len(token) > 1 else ""
