"""The language model's tokens: how many a conversation takes, and which of them a document must not make."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import lru_cache

from pipelines.rag.prompts.control_tokens import USUAL, ControlTokens
from pipelines.text.tokenizer import INLINE_CHARS, Tokenizer
from pipelines.text.types import ChatMessage
from sluice.errors import ErrorCode, SluiceError

_TOKENS_A_MESSAGE = 8
"""What chat templates put around a message, at most; most put 3 to 5."""
_NUM_KEPT = 2048
"""Texts whose counts are kept, a few megabytes: popular chunks come up often, and nothing else here takes as long."""


class PromptTokens(ABC):
    """Counts as one language model does."""

    def __init__(self, control_tokens: ControlTokens) -> None:
        self._control_tokens = control_tokens

    def defused(self, text: str) -> str:
        """`text` without the model's control tokens."""
        return self._control_tokens.defused(text)

    @abstractmethod
    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        """Of a conversation as the model gets it. Raises SluiceError INVALID for one that its template refuses."""

    @abstractmethod
    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        """Of each text by itself."""

    async def count_turns(self, messages: Sequence[ChatMessage]) -> list[int]:
        """The most that each message adds to a conversation."""
        counts = await self.count_texts([message.content for message in messages])
        return [count + _TOKENS_A_MESSAGE for count in counts]

    @abstractmethod
    async def takes_system(self) -> bool:
        """Whether a conversation may begin with a system message; some chat templates refuse one."""


class TokenizerTokens(PromptTokens):
    """Exact, by the model's tokenizer and chat template. A tokenizer without a template counts what one would add."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(ControlTokens.of(tokenizer))
        self._tokenizer = tokenizer
        self._count_text = lru_cache(_NUM_KEPT)(lambda text: len(tokenizer.encode_words(text, "context")))
        self._has_template: bool | None = None
        self._takes_system: bool | None = None

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

    async def takes_system(self) -> bool:
        if self._takes_system is None:
            user = ChatMessage("user", "?")
            self._takes_system = await self._renders(ChatMessage("system", "!"), user) or not await self._renders(user)
        return self._takes_system

    async def _renders(self, *messages: ChatMessage) -> bool:
        try:
            await self._tokenizer.encode_chat(messages)
        except SluiceError as error:
            if error.code is not ErrorCode.INVALID:
                raise
            return False
        return True


class EstimatedTokens(PromptTokens):
    """For a model whose tokenizer is not here: a token for every so many ASCII characters, and for each other one."""

    def __init__(self, chars_per_token: float) -> None:
        super().__init__(ControlTokens(USUAL))
        self._chars_per_token = chars_per_token

    async def count_chat(self, messages: Sequence[ChatMessage]) -> int:
        return sum(await self.count_turns(messages))

    async def count_texts(self, texts: Sequence[str]) -> list[int]:
        return [self._count(text) for text in texts]

    async def takes_system(self) -> bool:
        return True

    def _count(self, text: str) -> int:
        num_ascii = len(text.encode("ascii", "ignore"))
        return math.ceil(num_ascii / self._chars_per_token) + len(text) - num_ascii
