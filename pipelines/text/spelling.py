"""What single tokens stand for, as log probabilities name them."""

from itertools import count

import tokenizers

from pipelines.text.detokenizer import TokenBytes, byte_of_token, decoder_kinds, special_ids
from pipelines.text.types import TokenText


class TokenTexts(dict[int, TokenText]):
    """The text and bytes of each token by itself, worked out when it is first asked for.

    Special tokens read as they are written, although no text shows them; ids that the vocabulary lacks are empty.
    Shared by all sequences of a model, on the event loop's thread.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        self._special_ids = special_ids(backend)
        is_byte_level = decoder_kinds(backend) == ["ByteLevel"]
        self._bytes_of = TokenBytes(backend) if is_byte_level else None
        self._anchor = [] if is_byte_level else self._find_anchor()
        self._anchor_text = backend.decode(self._anchor)

    def __missing__(self, token_id: int) -> TokenText:
        spelled = self._spelled(token_id)
        token = self[token_id] = TokenText(token_id, spelled.decode(errors="replace"), spelled)
        return token

    def _spelled(self, token_id: int) -> bytes:
        written = self._backend.id_to_token(token_id)
        if written is None:
            return b""
        if token_id in self._special_ids:
            return written.encode()
        if self._bytes_of is not None:
            return self._bytes_of[token_id]
        byte = byte_of_token(written)
        return self._after_anchor(token_id).encode() if byte is None else byte

    def _after_anchor(self, token_id: int) -> str:
        """What the token adds to another one: the first of a text would lose its space."""
        return self._backend.decode([*self._anchor, token_id])[len(self._anchor_text) :]

    def _find_anchor(self) -> list[int]:
        """Any ordinary token that has text."""
        for token_id in count():
            written = self._backend.id_to_token(token_id)
            if written is None:
                return []
            is_ordinary = token_id not in self._special_ids and byte_of_token(written) is None
            if is_ordinary and self._backend.decode([token_id]).isalpha():
                return [token_id]
        raise AssertionError("a vocabulary has an end")
