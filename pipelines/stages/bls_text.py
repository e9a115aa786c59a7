"""Incremental text of a sequence in a stream of BLS, up to and including its first stop word."""

from collections.abc import Awaitable, Callable, Sequence

from sluice.pipelines.text.detokenizer import REPLACEMENT_CHARACTER, Detokenizer
from sluice.pipelines.text.stream import StopStrings

Decode = Callable[[list[int]], Awaitable[str]]
"""Returns the text of a whole sequence."""


class BeamText:
    """The text of one beam of a stream: what its tokens add, and the whole so far in `text`."""

    def __init__(self, text: "DetokenizedText | DecodedText", stop_words: Sequence[str]) -> None:
        self._incremental = text
        self._cutter = StopWordCutter(stop_words)
        self.text = ""

    @property
    def is_stopped(self) -> bool:
        return self._cutter.is_stopped

    async def feed(self, token_ids: Sequence[int], *, is_last: bool) -> str:
        """Add tokens and return the text that they add; with the last ones also the text kept back."""
        if self.is_stopped:
            return ""
        piece = self._cutter.feed(await self._incremental.feed(token_ids))
        if is_last:
            piece += self._cutter.feed(await self._incremental.flush()) + self._cutter.flush()
        self.text += piece
        return piece


class DetokenizedText:
    """The text of one sequence by a detokenizer of this process. Gets each token once, in order."""

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer

    async def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete. Text that may still change is kept back."""
        return self._detokenizer.feed(token_ids)

    async def flush(self) -> str:
        """Return the text kept back, at the end."""
        return self._detokenizer.flush()


class DecodedText:
    """The same by a model that only decodes whole sequences: it gets all tokens again for each new piece."""

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
        return "" if self._text.endswith(REPLACEMENT_CHARACTER) else self._new()

    async def flush(self) -> str:
        return self._new()

    def _new(self) -> str:
        new = self._text[self._num_shown :]
        self._num_shown += len(new)
        return new


class StopWordCutter:
    """Cuts a text off after its first stop word, which stays part of the text, as in NVIDIA's BLS."""

    def __init__(self, words: Sequence[str]) -> None:
        """Raise SluiceError INVALID for too many or too long words."""
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
    def cut(cls, text: str, words: Sequence[str]) -> str:
        """Return a whole text up to and including its first stop word."""
        cutter = cls(words)
        return cutter.feed(text) + cutter.flush()
