"""What is told of one thing that was looked at."""

from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"
    """It works; one should know."""
    WARN = "warn"
    """It works, and will be worse than it need be or fail under load."""
    FAIL = "fail"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`remedy` says what to do, "" where nothing is to be done."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def note(subject: str, text: str, remedy: str = "") -> Finding:
    return Finding(Level.NOTE, subject, text, remedy)


def warn(subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARN, subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, subject, text, remedy)
