"""Token ids to text, a piece at a time.

For any way of cutting the ids into pieces, the pieces joined are the tokenizer's own
`decode(ids, skip_special_tokens=True)`, and no piece ends within a character. The cost of a token does not
grow with the text before it.
"""

import json
import re
from codecs import utf_8_decode
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

# How many tokens of context decide how a token reads. One is what the known decoders look at (WordPiece and
# BPE suffixes: the space to the neighbour); the others cover tokens that decode to nothing.
_CONTEXT_TOKENS = 4
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """The text of one sequence; belongs to that sequence's task."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these further tokens complete; what may still change is kept back."""
        ...

    def flush(self) -> str:
        """The text kept back, at the end of the sequence. Half a character comes out as U+FFFD."""
        ...


def detokenizer_factory(backend: tokenizers.Tokenizer) -> Callable[[], Detokenizer]:
    """How to make detokenizers for this tokenizer; what they share is made once, here."""
    kinds = decoder_kinds(backend)
    if kinds == ["ByteLevel"]:
        table = TokenBytes(backend)
        return lambda: ByteLevelDetokenizer(table)
    if "ByteLevel" in kinds:
        raise ValueError(f"a ByteLevel decoder within a sequence ({', '.join(kinds)}) is not supported")
    vocabulary = backend.get_vocab()
    shown = frozenset(vocabulary.values()) - special_ids(backend)
    byte_tokens = frozenset(i for token, i in vocabulary.items() if byte_of_token(token) is not None)
    return lambda: WindowDetokenizer(backend, shown, byte_tokens)


class TokenBytes(dict[int, bytes]):
    """The bytes that each id stands for under a ByteLevel decoder, worked out when an id is first seen.

    Special tokens and ids that the vocabulary lacks stand for none. Shared by all sequences of a model.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(dict.fromkeys(special_ids(backend), b""))
        self._backend = backend
        self._alphabet = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        try:
            spelled = bytes(self._alphabet[char] for char in token)
        except KeyError:  # an added token that is not spelled in the alphabet is taken as it is written
            spelled = token.encode()
        self[token_id] = spelled
        return spelled


class ByteLevelDetokenizer:
    """For ByteLevel decoders (GPT-2, Llama 3, Qwen and their kin): each token is a fixed string of bytes."""

    def __init__(self, table: Mapping[int, bytes]) -> None:
        self._bytes_of = table.__getitem__
        self._held = b""
        """The beginning of a character: at most 3 bytes."""

    def feed(self, token_ids: Sequence[int]) -> str:
        spelled = self._held + b"".join(map(self._bytes_of, token_ids))
        text, used = utf_8_decode(spelled, "replace", False)
        self._held = spelled[used:]
        return text

    def flush(self) -> str:
        text, _ = utf_8_decode(self._held, "replace", True)
        self._held = b""
        return text


class WindowDetokenizer:
    """For every other decoder: a token's text is what it adds to the text of the few tokens before it.

    A run of byte tokens (`<0xE2>`) is kept back until another token ends it, because one invalid byte
    changes how the whole run decodes.
    """

    def __init__(self, backend: tokenizers.Tokenizer, shown: frozenset[int], byte_tokens: frozenset[int]) -> None:
        """`shown` are the ids that have text: known and not special."""
        self._decode: Callable[..., str] = backend.decode
        self._shown = shown
        self._byte_tokens = byte_tokens
        self._context: deque[int] = deque(maxlen=_CONTEXT_TOKENS)
        self._held: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        pieces = []
        for token_id in token_ids:
            if token_id not in self._shown:
                continue
            self._held.append(token_id)
            if token_id not in self._byte_tokens:
                pieces.append(self.flush())
        return "".join(pieces)

    def flush(self) -> str:
        if not self._held:
            return ""
        before = list(self._context)
        text = self._decode(before + self._held)[len(self._decode(before)) :]
        self._context.extend(self._held)
        self._held.clear()
        return text


def decoder_kinds(backend: tokenizers.Tokenizer) -> list[str]:
    """The types of the decoder's steps; none where the tokenizer has no decoder."""
    if backend.decoder is None:
        return []
    decoder: dict[str, Any] = json.loads(backend.decoder.__getstate__())
    steps: Iterable[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [step["type"] for step in steps]


def byte_of_token(token: str) -> bytes | None:
    """The byte that a token such as `<0xE2>` stands for."""
    match = _BYTE_TOKEN.fullmatch(token)
    return bytes.fromhex(match[1]) if match else None


def special_ids(backend: tokenizers.Tokenizer) -> frozenset[int]:
    """Ids of the tokens that no text shows."""
    return frozenset(i for i, token in backend.get_added_tokens_decoder().items() if token.special)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest for U+0100 and on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = sorted(set(range(256)) - printable)
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
