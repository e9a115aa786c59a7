"""Plain text functions that all later steps share: tidying and sentence splitting."""

from __future__ import annotations

import hashlib
import re

_TYPOGRAPHY = str.maketrans(
    {
        "\xa0": " ", "¶": "", "\u200b": "", "§": "", "…": "...",
        "’": "'", "‘": "'", "“": '"', "”": '"', "–": "-",
    }
)  # fmt: skip
# A full stop after these does not end a sentence.
_ABBREVIATION = re.compile(r"\b(e\.g|i\.e|etc|vs|cf|approx|resp|fig|no)\. ", re.IGNORECASE)
# Nor does one after an initial ("J. Smith"); one after an acronym may.
_SENTENCE_GAP = re.compile(r"(?:(?<=[a-z0-9)\]\"'`][.!?])|(?<=[A-Z]{2}[.!?])) +(?=[A-Z\"(`])")
_HELD = "\x01"


def words(text: str) -> tuple[str, ...]:
    """Split a word list that is written as prose."""
    return tuple(text.split())


def tidy(text: str) -> str:
    """Return the text on one line, with plain quotes and spaces."""
    return " ".join(text.translate(_TYPOGRAPHY).split())


def sentences(text: str) -> list[str]:
    """Split prose into sentences, by the rule of training and evaluation."""
    held = _ABBREVIATION.sub(lambda match: f"{match[1]}.{_HELD}", text)
    return [part.replace(_HELD, " ") for part in _SENTENCE_GAP.split(held)]


def is_plain_english(text: str) -> bool:
    return bool(text) and sum(map(str.isascii, text)) / len(text) > 0.97


def stable_hash(text: str) -> int:
    """Return a hash that is the same in every process, unlike `hash`."""
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:8], 16)
