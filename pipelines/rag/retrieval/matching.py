"""Whether a chunk has the words that a question is about, however unlike the two are as a whole."""

import re

from pipelines.rag.types import Hit

_WORD = re.compile(r"\w+")
_COMMON = frozenset(
    _WORD.findall(
        "a about all also an and any are as at be been but by can could did do does doing done for from get give had "
        "has have he her his how i if in into is it its just let many may me mean means might more most much must my "
        "no not of on one or other our out please say says shall she should so some such tell than that the their "
        "them then there these they this those to up us use used using was we were what when where which while who "
        "whom whose why will with would you your"
    )
)
"""Words that say nothing of what an English question is about; nearly every text has some of them."""


def subjects(question: str) -> frozenset[str]:
    """The words of the question that say what it is about, names like `max_num_seqs` as a whole."""
    return frozenset(_WORD.findall(question.casefold())) - _COMMON


def names(hit: Hit, words: frozenset[str]) -> bool:
    """Whether chunk, heading and title have at least half of the `words`: one of several may be there by chance."""
    if not words:
        return False
    found = words.intersection(_WORD.findall(f"{hit.title} {hit.heading} {hit.text}".casefold()))
    return 2 * len(found) >= len(words)
