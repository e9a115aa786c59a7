"""The table of claims at the end of `make test-gpu`, and what the machine is, as Markdown for an issue."""

import json
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import pytest

from tests.paths import ROOT

FILE = ROOT / "build" / "gpu-report.md"
_REASON_LENGTH = 160


@dataclass
class Claim:
    """One claim with its outcome: shown, failed, skipped, or not run."""

    text: str
    outcome: str = "not run"
    reason: str = ""
    seconds: float = 0.0

    def add(self, report: pytest.TestReport) -> None:
        """Count a phase of the claim's test: its time, and its outcome unless it only prepares or cleans up well."""
        self.seconds += report.duration
        if report.outcome != "passed":
            self.outcome, self.reason = report.outcome, reason_of(report)
        elif report.when == "call":
            self.outcome = "shown"


def reason_of(report: pytest.TestReport) -> str:
    """Return why a test was skipped or failed, on one line."""
    if isinstance(report.longrepr, tuple):
        text = report.longrepr[2].removeprefix("Skipped: ")
    else:
        crash = getattr(report.longrepr, "reprcrash", None)
        text = report.longreprtext if crash is None else crash.message
    line = " ".join(text.split())
    return line if len(line) <= _REASON_LENGTH else f"{line[: _REASON_LENGTH - 1]}…"


def table(claims: Iterable[Claim]) -> list[str]:
    """Return the lines of a table in Markdown."""
    rows = [(each.text, each.outcome, each.reason.replace("|", "\\|"), f"{each.seconds:.1f}") for each in claims]
    return [f"| {' | '.join(row)} |" for row in (("claim", "outcome", "reason", "seconds"), ("---",) * 4, *rows)]


def machine() -> list[str]:
    """Return what the machine is, one list item a line: the system, the commit, and what `sluice doctor` finds."""
    doctor = subprocess.run(
        [sys.executable, "-m", "sluice.cli", "doctor", "--json"], capture_output=True, text=True, cwd=ROOT
    )
    findings = json.loads(doctor.stdout)["findings"] if doctor.stdout else []
    git = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT)
    facts = {"system": platform.platform(), "commit": git.stdout.strip() or "unknown"}
    facts |= {each["subject"]: each["text"] for each in findings} or {"sluice doctor": doctor.stderr.strip()}
    return [f"- {subject}: {text}" for subject, text in facts.items()]
