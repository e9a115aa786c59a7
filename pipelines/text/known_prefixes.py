"""Token ids of conversations that go on: what their texts began with before is not tokenized again."""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from threading import Lock

from tokenizers import AddedToken

MAX_BYTES = 16 << 20
"""Bytes that are kept for one tokenizer, where a character takes one. Most take another one for their tokens; some, of
many tokens, 16."""
_MAX_TEXTS = 256
Encode = Callable[[str], list[int]]


def find_seams(added: Iterable[AddedToken]) -> tuple[str, ...]:
    """Return the added tokens at which a text may be cut: the pieces have the token ids that the text has.

    A tokenizer looks for these in the text as it is, and tokenizes what is between them apart. A token that takes the
    white space before it, or depends on the word around it, is no seam. Where one may begin within another there are
    none.
    """
    plain = [token for token in added if token.content and not token.normalized]
    first = {token.content[0] for token in plain}
    if any(char in first for token in plain for char in token.content[1:]):
        return ()
    if any(token.lstrip or token.single_word for token in plain):
        return ()
    return tuple(token.content for token in plain)


class KnownPrefixes:
    """Tokenizes texts that begin as others did. Usable from any thread.

    Of each text the part before its last seam is kept: a conversation goes on behind it, where the answer began.
    """

    def __init__(self, encode: Encode, seams: tuple[str, ...]) -> None:
        self._encode = encode
        self._seams = seams
        self._first_chars = {seam[0] for seam in seams}
        self._known: OrderedDict[tuple[str, str], array[int]] = OrderedDict()
        """Token ids by salt and text, the latest used last."""
        self._num_bytes = 0
        self._lock = Lock()

    def encode(self, text: str, salt: str = "") -> list[int]:
        """Return the token ids of a text. Only texts with the same salt are looked at: the time that it takes tells
        nothing of others."""
        end = self._last_seam(text)
        start, known = self._find(text, end, salt)
        if end <= start:
            return [*known, *self._encode(text[start:])]
        before = array("I", known)
        before.extend(self._encode(text[start:end]))
        self._keep((salt, text[:end]), before)
        return [*before, *self._encode(text[end:])]

    def _last_seam(self, text: str) -> int:
        """Return where the last seam begins; 0 without one."""
        return max((self._last_seam_of(text, char) for char in self._first_chars), default=0)

    def _last_seam_of(self, text: str, char: str) -> int:
        place = text.rfind(char)
        while place > 0 and not text.startswith(self._seams, place):
            place = text.rfind(char, 0, place)
        return max(0, place)

    def _find(self, text: str, end: int, salt: str) -> tuple[int, Iterable[int]]:
        """Return the length of the longest known text that this begins with up to a seam, and its token ids."""
        with self._lock:
            of_salt = (each for salted, each in self._known if salted == salt)
            fitting = [each for each in of_salt if len(each) <= end and text.startswith(each)]
            best = max((each for each in fitting if text.startswith(self._seams, len(each))), key=len, default="")
            if not best:
                return 0, ()
            self._known.move_to_end((salt, best))
            return len(best), self._known[salt, best]

    def _keep(self, key: tuple[str, str], ids: "array[int]") -> None:
        """Keep a text of a salt, and as many of the latest others as there is room for: several may go on from each."""
        size = _size_of(key, ids)
        if size > MAX_BYTES:
            return
        with self._lock:
            if self._known.pop(key, None) is None:
                self._num_bytes += size
            self._known[key] = ids
            while len(self._known) > _MAX_TEXTS or self._num_bytes > MAX_BYTES:
                self._num_bytes -= _size_of(*self._known.popitem(last=False))


def _size_of(key: tuple[str, str], ids: "array[int]") -> int:
    return len(key[1]) + ids.itemsize * len(ids)
