"""Keeps the text of messages from becoming control tokens, which only the chat template may write."""

import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, models

_OPEN, _CLOSE = "\U000f0000", "\U000f0001"
"""Private characters around a stand-in, which consists of digits. Chat templates may trim, cut, join, fold the case of
and quote what they get; none of it makes one stand-in another."""
_NONCE_RANGE = 10**15
"""Stand-ins have a random number below this, because clients can send private characters too."""


_STRANGE = f"{_OPEN} \u2603"
"""Characters that few vocabularies have. Their token may be a control token, as <unk> is, and stays."""


class Spelled(NamedTuple):
    """A control token in a text: its place, and its name without white space that it may absorb."""

    start: int
    end: int
    token: str


_start, _end = attrgetter("start"), attrgetter("end")


class ControlTokenGuard:
    """Encodes conversations whose contents spell control tokens (`<|end|>`): only those of the template count.

    Added tokens that are not special (`<think>`) are no control tokens here: a model's own answers show them, and come
    back as the history of a conversation.
    """

    def __init__(
        self, special: Sequence[AddedToken], normalizer: Any, encode: "RenamingEncoder | SplitEncoder"
    ) -> None:
        """Take the tokenizer's special tokens, and its normalizer, which it may apply before it looks for them."""
        is_normalized = normalizer is not None and any(token.normalized for token in special)
        may_be_any = is_normalized or encode.finds_tokens
        self.first_chars = {""} if may_be_any else {token.content[0] for token in special}
        """Strings of which one is in every text that spells a control token: "" where that may be any text."""
        self._finder = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._finder.normalizer = normalizer
        self._finder.add_special_tokens(list(special))
        self._encode = encode

    def is_needed(self, contents: Sequence[str]) -> bool:
        """Whether one of the contents, or several side by side, spell a control token."""
        return self._encode.finds_tokens or bool(self._find("".join(contents)))

    def encode(self, contents: Sequence[str], render: Callable[[list[str]], str]) -> list[int]:
        """Return the token ids of a conversation. `render` makes its text of contents that stand for the given ones."""
        stand_ins = _StandIns()
        rendered = render(stand_ins.shield(contents, self._find("".join(contents))))
        return self._encode(rendered, self._find(rendered), stand_ins.restore)

    def _find(self, text: str) -> list[Spelled]:
        [found] = self._finder.encode_batch([text], add_special_tokens=False)
        places = zip(found.offsets, found.tokens, strict=True)
        return [Spelled(start, end, token) for (start, end), token in places if token]


class _StandIns:
    """Puts a stand-in for each control token that contents spell, and later the text in its place again."""

    def __init__(self) -> None:
        self._nonce = secrets.randbelow(_NONCE_RANGE)
        self._numbers: dict[str, int] = {}
        """Numbers of the stand-ins, by the text that each stands for."""

    def shield(self, contents: Sequence[str], found: list[Spelled]) -> list[str]:
        """Return the contents with stand-ins for what was `found` in them side by side, the parts of a token that two
        contents spell together included."""
        shielded, start = [], 0
        for content in contents:
            end = start + len(content)
            parts = [
                Spelled(max(each.start, start) - start, min(each.end, end) - start, each.token)
                for each in found[bisect_right(found, start, key=_end) : bisect_left(found, end, key=_start)]
            ]
            shielded.append(_replace(content, parts, self._stand_in))
            start = end
        return shielded

    def _stand_in(self, spelled: str, token: str) -> str:
        number = self._numbers.setdefault(spelled, len(self._numbers))
        return f"{_OPEN}{self._nonce}.{number}{_CLOSE}"

    def restore(self, text: str) -> str:
        texts = list(self._numbers)
        return re.sub(rf"{_OPEN}{self._nonce}\.(\d+){_CLOSE}", lambda match: texts[int(match[1])], text)


class RenamingEncoder:
    """Encodes text in which the control tokens at the counted places count as such, and all others only spell their
    names, with a second tokenizer over the same model, which has random names in place of the control tokens. All
    else is encoded as the tokenizer itself does. A control token that the model finds in a text (Unigram) is left out.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: Container[int]) -> None:
        """Take a fast tokenizer's backend, and the ids of its control tokens."""
        self.finds_tokens = isinstance(backend.model, models.Unigram)
        added = backend.get_added_tokens_decoder()
        nonce = secrets.randbelow(_NONCE_RANGE)
        self._names = {token.content: f"{_OPEN}{nonce}.{i}{_CLOSE}" for i, token in added.items() if i in special_ids}
        self._renamed = tokenizers.Tokenizer(backend.model)  # which shares the model's memory
        self._renamed.normalizer, self._renamed.pre_tokenizer = backend.normalizer, backend.pre_tokenizer
        self._renamed.add_tokens([_rename(token, self._name(token.content)) for token in added.values()])
        self._ids = {self._renamed.token_to_id(self._name(token.content)): i for i, token in added.items()}
        """The tokenizer's own ids of added tokens, by those that they have under other names."""
        unknown_ids = self._unknown_ids()
        self._dropped_ids = {i for i in added if i in special_ids and i not in self._ids and i not in unknown_ids}

    def __call__(self, text: str, counted: list[Spelled], restore: Callable[[str], str]) -> list[int]:
        named = restore(_replace(text, counted, lambda _, token: self._name(token)))
        [encoding] = self._renamed.encode_batch([named], add_special_tokens=False)
        return [self._ids.get(i, i) for i in encoding.ids if i not in self._dropped_ids]

    def _unknown_ids(self) -> list[int]:
        try:
            ids: list[int] = self._renamed.encode(_STRANGE, add_special_tokens=False).ids
        except Exception as error:
            if type(error) is not Exception:
                raise
            return []  # of the library's only type: the vocabulary has no token for unknown characters
        return ids

    def _name(self, token: str) -> str:
        return self._names.get(token, token)


class SplitEncoder:
    """Encodes with a tokenizer of transformers in Python, piece by piece between the control tokens that count."""

    finds_tokens = False

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str, counted: list[Spelled], restore: Callable[[str], str]) -> list[int]:
        ids: list[int] = []
        start = 0
        for each in counted:
            ids += self._plain(restore(text[start : each.start]))
            ids.append(self._tokenizer.convert_tokens_to_ids(each.token))
            start = each.end
        return ids + self._plain(restore(text[start:]))

    def _plain(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


def _rename(token: AddedToken, name: str) -> AddedToken:
    flags = {each: getattr(token, each) for each in ("single_word", "lstrip", "rstrip", "normalized", "special")}
    return AddedToken(name, **flags)


def _replace(text: str, places: Iterable[Spelled], by: Callable[[str, str], str]) -> str:
    """Replace places by what `by` makes of their text and of the token that they spell."""
    pieces, start = [], 0
    for each in places:
        pieces += [text[start : each.start], by(text[each.start : each.end], each.token)]
        start = each.end
    return "".join([*pieces, text[start:]])
