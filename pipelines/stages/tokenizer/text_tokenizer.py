"""Texts to token ids by the rules of one tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path

import tokenizers

from sluice.errors import ErrorCode, SluiceError

_PIECE_CHARS = 50_000
"""What a long text is tokenized in pieces of: the library keeps some hundred bytes for each token."""


class TextTokenizer:
    """Threads may share one. Padding and truncation of the file are left out: they are the caller's to choose."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, max_tokens: int = 0, *, adds_special: bool = True) -> None:
        """`max_tokens` a text, with its special tokens; 0 is any number. `tokenizer` is its own from now on."""
        padding = tokenizer.padding
        self.pad_id: int = padding["pad_id"] if padding else 0
        tokenizer.no_padding()
        tokenizer.no_truncation()
        # A copy, as truncation is a state of the tokenizer.
        self._whole = tokenizers.Tokenizer.from_str(tokenizer.to_str())
        self._max_tokens = max_tokens
        if max_tokens:
            tokenizer.enable_truncation(max_tokens)
        self._tokenizer = tokenizer
        self._adds_special = adds_special

    @classmethod
    def load(cls, path: Path, max_tokens: int = 0, *, adds_special: bool = True) -> "TextTokenizer":
        """For a thread. Raises SluiceError UNAVAILABLE for what is no tokenizer.json."""
        if not path.is_file():
            raise SluiceError(ErrorCode.UNAVAILABLE, f"unable to find the tokenizer '{path}'")
        try:
            return cls(tokenizers.Tokenizer.from_file(str(path)), max_tokens, adds_special=adds_special)
        except Exception as error:  # the library raises nothing narrower for a damaged file
            raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot load the tokenizer '{path}': {error}") from error

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """A list of ids for each text. Holds Python's lock: for short ones."""
        return [self._tokenizer.encode(text, add_special_tokens=self._adds_special).ids for text in texts]

    def encode_long(self, texts: Sequence[str]) -> list[list[int]]:
        """The same for a thread: others run meanwhile."""
        return [self._ids(text) for text in texts]

    def _ids(self, text: str) -> list[int]:
        """Of a text that will be cut its beginning is enough, as far as it has more tokens than are kept."""
        if self._max_tokens and len(text) > _PIECE_CHARS:
            _, end = pieces_of(text, _PIECE_CHARS)[0]
            beginning = self._unlocked(self._tokenizer, text[:end], adds_special=self._adds_special)
            if beginning.overflowing:
                return beginning.ids
        return self._unlocked(self._tokenizer, text, adds_special=self._adds_special).ids

    def starts(self, text: str) -> list[int]:
        """Where each token of the whole text begins, in characters, never falling; no special tokens. For a thread."""
        found: list[int] = []
        for start, end in pieces_of(text, _PIECE_CHARS):
            offsets = self._unlocked(self._whole, text[start:end], adds_special=False).offsets
            latest = start
            for offset, _ in offsets:
                latest = max(latest, start + offset)
                found.append(latest)
        return found

    @staticmethod
    def _unlocked(tokenizer: tokenizers.Tokenizer, text: str, *, adds_special: bool) -> tokenizers.Encoding:
        # Of the library's calls only this one lets go of Python's lock; with one text it starts no threads.
        return tokenizer.encode_batch([text], add_special_tokens=adds_special)[0]


def pieces_of(text: str, size: int) -> list[tuple[int, int]]:
    """Start and end of pieces of at most `size` characters, which end behind white space where there is any."""
    found, start = [], 0
    while len(text) - start > size:
        end = start + size
        cut = max(text.rfind(" ", start, end), text.rfind("\n", start, end)) + 1
        end = cut if cut > start else end
        found.append((start, end))
        start = end
    if start < len(text):
        found.append((start, len(text)))
    return found
