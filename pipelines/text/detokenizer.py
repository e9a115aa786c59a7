"""Incremental detokenization: token ids to text, a piece at a time. However the ids are cut into pieces, the joined
text equals the tokenizer's own `decode(ids)` with or without special tokens, and no piece ends within a character. The
cost of a token does not grow with the text before it."""

import json
import re
from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, Protocol

import tokenizers

from sluice.pipelines.text.types import TokenText

REPLACEMENT_CHARACTER = "\ufffd"
"""Stands for a character of which only some bytes are there."""
_CONTEXT_TOKENS = 4
"""Tokens before a token that may decide how it reads. The known decoders look at one (WordPiece and BPE suffixes: the
space to the neighbour); the others cover tokens that decode to nothing."""
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Makes the text of one sequence; only that sequence's task uses it."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that they complete. Text that may still change is kept back."""
        ...

    def flush(self) -> str:
        """Return the text kept back, at the end of the sequence. Half a character becomes U+FFFD."""
        ...


def detokenizer_factory(
    backend: tokenizers.Tokenizer, *, skip_special_tokens: bool = True
) -> Callable[[], Detokenizer]:
    """Return a function that makes detokenizers for this tokenizer. Their shared tables are built here, once."""
    kinds = decoder_kinds(backend)
    if kinds == ["ByteLevel"]:
        table = TokenBytes(backend, skip_special_tokens=skip_special_tokens)
        return lambda: ByteLevelDetokenizer(table)
    if "ByteLevel" in kinds:
        raise ValueError(f"a ByteLevel decoder within a sequence ({', '.join(kinds)}) is not supported")
    vocabulary = backend.get_vocab()
    shown = frozenset(vocabulary.values()) - (special_ids(backend) if skip_special_tokens else frozenset())
    byte_tokens = frozenset(i for token, i in vocabulary.items() if parse_byte_token(token) is not None)
    decode = partial(backend.decode, skip_special_tokens=skip_special_tokens)
    return lambda: WindowDetokenizer(decode, shown, byte_tokens)


class ByteLevelDetokenizer:
    """Detokenizes for ByteLevel decoders (GPT-2, Llama 3, Qwen, ...), where each token is a fixed byte string."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._bytes_of = table.__getitem__
        self._pending = b""
        """First bytes of an incomplete character, at most 3."""

    def feed(self, token_ids: Sequence[int]) -> str:
        spelled = self._pending + b"".join(map(self._bytes_of, token_ids))
        text, used = utf_8_decode(spelled, "replace", False)
        self._pending = spelled[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._pending, "replace", True)
        self._pending = b""
        return text


class WindowDetokenizer:
    """Detokenizes for all other decoders: a token's text is what it adds to the few tokens before it. A run of byte
    tokens (`<0xE2>`) is kept back until another token ends it: one invalid byte changes how the whole run decodes."""

    def __init__(
        self, decode: Callable[[Sequence[int]], str], shown: frozenset[int], byte_tokens: frozenset[int]
    ) -> None:
        """Take the ids that have text as `shown`."""
        self._decode = decode
        self._shown = shown
        self._byte_tokens = byte_tokens
        self._context: deque[int] = deque(maxlen=_CONTEXT_TOKENS)
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if token_id not in self._shown:
                continue
            self._pending.append(token_id)
            if token_id not in self._byte_tokens:
                pieces.append(self.flush())
        return "".join(pieces)

    def flush(self) -> str:
        if not self._pending:
            return ""
        before = list(self._context)
        text = self._decode(before + self._pending)[len(self._decode(before)) :]
        self._context.extend(self._pending)
        self._pending.clear()
        return text


class SlowDetokenizer:
    """Detokenizes by the tokenizer's own `decode`, for unknown decoders. A token's text is what it adds to the tokens
    shown before it, kept back while it ends within a character, and while more tokens do not make it longer."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._shown: list[int] = []
        """The last tokens whose text was returned. They are the context of the next ones."""
        self._pending: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token_id in token_ids:
            self._pending.append(token_id)
            added = self._added()
            if added and not added.endswith(REPLACEMENT_CHARACTER):
                pieces.append(self._take(added))
        return "".join(pieces)

    def flush(self) -> str:
        return self._take(self._added())

    def _added(self) -> str:
        return self._decode(self._shown + self._pending)[len(self._decode(self._shown)) :]

    def _take(self, text: str) -> str:
        self._shown, self._pending = self._pending, []
        return text


class UnspacedDetokenizer:
    """Leaves out the spaces that a decoder writes between two added tokens in a row, as vLLM does."""

    def __init__(self, detokenizer: Detokenizer, added: Mapping[int, str]) -> None:
        """Take the texts of the added tokens by id."""
        self._detokenizer = detokenizer
        self._added = added
        self._follows_added = False

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(self._feed_one, token_ids))

    def _feed_one(self, token_id: int) -> str:
        text, is_added = self._detokenizer.feed((token_id,)), token_id in self._added
        if is_added and self._follows_added:
            text = self._added[token_id]
        self._follows_added = is_added
        return text

    def flush(self) -> str:
        return self._detokenizer.flush()


class TokenBytes(dict[int, bytes]):
    """The bytes of each token id under a ByteLevel decoder, computed when the id is first looked up. Ids that the
    vocabulary lacks have no bytes, and special tokens have none or their names. All sequences of a model share it."""

    def __init__(self, backend: tokenizers.Tokenizer, *, skip_special_tokens: bool = True) -> None:
        names = backend.get_added_tokens_decoder()
        ids = special_ids(backend)
        super().__init__({i: b"" if skip_special_tokens else names[i].content.encode() for i in ids})
        self._backend = backend
        self._alphabet = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            spelled = bytes(self._alphabet[char] for char in token)
        except KeyError:  # an added token outside the alphabet stands for its own text
            spelled = token.encode()
        self[token_id] = spelled
        return spelled


class TokenTexts(dict[int, TokenText]):
    """The text and bytes of each token by itself, for log probabilities, computed when an id is first looked up. A
    special token has its own name as text, although no generated text shows it; an id that the vocabulary lacks has
    empty text. All sequences of a model share the table, on the event loop's thread."""

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
        byte = parse_byte_token(written)
        if byte is not None:
            return byte
        # The text that the token adds to another one: the first token of a text would lose its space.
        return self._backend.decode([*self._anchor, token_id])[len(self._anchor_text) :].encode()

    def _find_anchor(self) -> list[int]:
        """Return some ordinary token that has text, as a list of one; an empty list where there is none."""
        for token_id in count():
            written = self._backend.id_to_token(token_id)
            if written is None:
                return []
            is_ordinary = token_id not in self._special_ids and parse_byte_token(written) is None
            if is_ordinary and self._backend.decode([token_id]).isalpha():
                return [token_id]
        raise AssertionError("a vocabulary has an end")


def decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """Return the types of the decoder's steps; an empty list for a tokenizer without a decoder."""
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: Iterable[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]


def parse_byte_token(token: str) -> bytes | None:
    """Return the byte that a token such as `<0xE2>` stands for; None for any other token."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else None


def special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Return the ids of the special tokens, which decoded text leaves out."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's characters to bytes: printable Latin-1 stands for itself, U+0100 and on for the rest."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = sorted(set(range(256)) - printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
