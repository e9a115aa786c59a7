"""Search terms of a text: its words, and the names in it as a whole.

Postgres stems the words and drops English stop words. It does not see punctuation: its own parser takes
`str.partition` for a host name and `--http-port` for a number's sign.
"""

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

MAX_QUERY_TERMS = 96
"""Most words, and most names, of one question; each costs one index lookup."""
_MAX_TERM_CHARS = 200
"""Longer terms are data, not words. Postgres' own limit is 2,046 bytes."""
_MAX_POSITION = 16_383
_WORD = re.compile(r"[^\W_]+")
_NAME = re.compile(r"(?<!\w)(?:\w++(?:[-.:/+]++\w++)++|(?=_*+[^\W_]++_|_++[^\W_])\w++|\w++[+#]++)")
"""Matches names like `str.partition`, `max_num_seqs`, `http-port`, `/v1/rag` and `C++`, in linear time."""


@dataclass(frozen=True, slots=True)
class SearchTerms:
    """The terms of a text in its order, with repetitions. They consist of letters, digits and, in names, `-._:/+#`."""

    words: Sequence[str]
    names: Sequence[str]

    @property
    def prose(self) -> str:
        """The words as text from which Postgres makes lexemes."""
        return " ".join(self.words)

    @property
    def tsvector(self) -> str:
        """The names as Postgres writes lexemes with positions, so that each counts as often as it occurs."""
        return " ".join(f"'{name}':{min(at, _MAX_POSITION)}" for at, name in enumerate(self.names, start=1))


def extract_terms(text: str) -> SearchTerms:
    """Extract the terms of a text, with case and forms of characters folded."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return SearchTerms(_drop_long(_WORD.findall(folded)), _drop_long(_NAME.findall(folded)))


def extract_query_terms(text: str) -> SearchTerms:
    """Extract the terms of a question, each once, the first MAX_QUERY_TERMS of a long one. Names are quoted lexemes."""
    terms = extract_terms(text)
    words = list(dict.fromkeys(terms.words))[:MAX_QUERY_TERMS]
    names = list(dict.fromkeys(terms.names))[:MAX_QUERY_TERMS]
    return SearchTerms(words, [f"'{name}'" for name in names])


def _drop_long(terms: list[str]) -> list[str]:
    return [term for term in terms if len(term) <= _MAX_TERM_CHARS]
