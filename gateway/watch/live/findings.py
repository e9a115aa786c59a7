"""Findings about a server or a machine, and how much each matters."""

from dataclasses import dataclass
from enum import StrEnum


class Severity(StrEnum):
    """The severity of a finding, least first."""

    OK = "ok"
    NOTE = "note"
    """It works, and the operator should know."""
    WARN = "warn"
    """It works, but worse than it could, or it fails under load."""
    FAIL = "fail"
    """It will not work."""


@dataclass(frozen=True, slots=True)
class GradedFinding:
    """The result of one check. `remedy` says what to do, "" where nothing is to be done."""

    level: Severity
    subject: str
    text: str
    remedy: str = ""
