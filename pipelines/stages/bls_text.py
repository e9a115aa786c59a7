"""Text that grows with its tokens, for BLS: one sequence of a stream."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from pipelines.text.detokenizer import Detokenizer
from pipelines.text.stream import StopStrings

Decode = Callable[[list[int]], Awaitable[str]]
"""The text of a whole sequence."""
_UNFINISHED = "\ufffd"


class IncrementalText(Protocol):
    """The text of one sequence. It gets each of its tokens once, in order."""

    async def feed(self, token_ids: Sequence[int]) -> str:
        """What these further tokens complete; what may still change is kept back."""
        ...

    async def flush(self) -> str:
        """What was kept back, at the end."""
        ...


class DetokenizedText:
    """By a detokenizer, which keeps what it needs of the tokens before."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    async def feed(self, token_ids: Sequence[int]) -> str:
        return self._detokenizer.feed(token_ids)

    async def flush(self) -> str:
        return self._detokenizer.flush()


class DecodedText:
    """By a model that knows whole sequences alone: it gets all tokens again each time, and what is new is passed on."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._text = ""
        self._num_shown = 0

    async def feed(self, token_ids: Sequence[int]) -> str:
        if not token_ids:
            return ""
        self._token_ids += token_ids
        self._text = await self._decode(self._token_ids)
        return "" if self._text.endswith(_UNFINISHED) else self._new()

    async def flush(self) -> str:
        return self._new()

    def _new(self) -> str:
        new = self._text[self._num_shown :]
        self._num_shown += len(new)
        return new


class StopWordCutter:
    """Ends behind the first stop word, which is part of the text here, as in NVIDIA's BLS."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raises SluiceError INVALID for too many or too long words."""
        self._stop = StopStrings(tuple(word for word in words if word))

    @property
    def is_stopped(self) -> bool:
        return self._stop.matched is not None

    def feed(self, piece: str) -> str:
        if self.is_stopped:
            return ""
        return self._stop.feed(piece) + (self._stop.matched or "")

    def flush(self) -> str:
        return "" if self.is_stopped else self._stop.flush()

    @classmethod
    def whole(cls, text: str, words: Sequence[str]) -> str:
        """A whole text up to and with its first stop word."""
        stopped = cls(words)
        return stopped.feed(text) + stopped.flush()
