"""What text is found by: its words, and the names in it, whole.

Postgres stems the words and leaves out those of English that say nothing. It does not get to see punctuation: its own
parser takes `str.partition` for a host name and `--http-port` for a number's sign.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MAX_QUERY_TERMS = 96
"""Of one question; each is a look into the index."""
_MAX_TERM_CHARS = 200
"""Longer ones are data, not words. Postgres' own limit is 2,046 bytes."""
_MAX_POSITION = 16_383
_WORD = re.compile(r"[^\W_]+")
_NAME = re.compile(r"(?<!\w)(?:\w++(?:[-.:/+]++\w++)++|(?=_*+[^\W_]++_|_++[^\W_])\w++|\w++[+#]++)")
"""`str.partition`, `max_num_seqs`, `http-port`, `/v1/rag`, `C++`. In linear time: a word may be as long as a text."""


@dataclass(frozen=True, slots=True)
class Terms:
    """In the order of the text, repeated as there. Of nothing but letters, digits and, in names, `-._:/+#`."""

    words: Sequence[str]
    names: Sequence[str]

    @property
    def prose(self) -> str:
        """What Postgres makes lexemes of."""
        return " ".join(self.words)

    @property
    def tsvector(self) -> str:
        """The names as Postgres writes lexemes with their positions, so that each counts as often as it is there."""
        return " ".join(f"'{name}':{min(at, _MAX_POSITION)}" for at, name in enumerate(self.names, start=1))


def terms_of(text: str) -> Terms:
    """Without distinction of case or form of the characters."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return Terms(_short(_WORD.findall(folded)), _short(_NAME.findall(folded)))


def query_terms(text: str) -> Terms:
    """Each once. Of a very long question those that come first."""
    terms = terms_of(text)
    words = list(dict.fromkeys(terms.words))[:MAX_QUERY_TERMS]
    names = list(dict.fromkeys(terms.names))[:MAX_QUERY_TERMS]
    return Terms(words, [f"'{name}'" for name in names])


def _short(found: list[str]) -> list[str]:
    return [term for term in found if len(term) <= _MAX_TERM_CHARS]
