"""Tokenizers that transformers has in Python only, behind the few methods that we use of the fast ones."""

from collections.abc import Sequence
from typing import Any, NamedTuple

_UNFINISHED = "\ufffd"


class _Encoding(NamedTuple):
    ids: list[int]


class SlowBackend:
    """Stands where a fast tokenizer has its `backend_tokenizer`."""

    decoder = None
    """Nothing is known of how its tokens become text; it has to be asked."""
    normalizer = None
    """Added tokens are sought in the text as it is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, add_special_tokens: bool = True) -> _Encoding:
        return _Encoding(self._tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Without the ids that the vocabulary lacks."""
        known = [token_id for token_id in token_ids if token_id < len(self._tokenizer)]
        text: str = self._tokenizer.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def id_to_token(self, token_id: int) -> str | None:
        if token_id >= len(self._tokenizer):
            return None
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        return token

    def get_added_tokens_decoder(self) -> dict[int, Any]:
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        return added


class SlowDetokenizer:
    """A token's text is what it adds to the text since the one before the last that had any.

    Text is kept back while it ends within a character, and while more tokens do not make it longer.
    """

    def __init__(self, backend: SlowBackend) -> None:
        self._decode = backend.decode
        self._shown: list[int] = []
        """Tokens whose text is out; they give the next ones their context."""
        self._held: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([self._feed_one(token_id) for token_id in token_ids])

    def flush(self) -> str:
        return self._take(self._added())

    def _feed_one(self, token_id: int) -> str:
        self._held.append(token_id)
        added = self._added()
        return "" if not added or added.endswith(_UNFINISHED) else self._take(added)

    def _added(self) -> str:
        return self._decode(self._shown + self._held)[len(self._decode(self._shown)) :]

    def _take(self, text: str) -> str:
        self._shown, self._held = self._held, []
        return text
