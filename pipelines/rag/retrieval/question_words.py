"""The words that a question is about, and whether a chunk mentions them, however dissimilar their vectors are."""

import re

from sluice.pipelines.rag.types import Hit

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
"""English words that do not tell what a question is about; nearly every text has some of them."""


def subject_words(question: str) -> frozenset[str]:
    """Return the words that tell what the question is about. Names like `max_num_seqs` stay whole."""
    return frozenset(_WORD.findall(question.casefold())) - _COMMON


def mentions_subject(hit: Hit, words: frozenset[str]) -> bool:
    """Whether chunk, heading and title contain at least half of `words`. One of several may be there by chance."""
    if not words:
        return False
    found = words.intersection(_WORD.findall(f"{hit.title} {hit.heading} {hit.text}".casefold()))
    return 2 * len(found) >= len(words)
