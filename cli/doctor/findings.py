"""Findings of `sluice doctor`, and the report of them: a table for people, JSON for programs."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sluice.gateway.watch.live.findings import GradedFinding, Severity

DoctorFinding = GradedFinding


def ok(subject: str, text: str) -> DoctorFinding:
    return DoctorFinding(Severity.OK, subject, text)


def note(subject: str, text: str, remedy: str = "") -> DoctorFinding:
    return DoctorFinding(Severity.NOTE, subject, text, remedy)


def warn(subject: str, text: str, remedy: str) -> DoctorFinding:
    return DoctorFinding(Severity.WARN, subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> DoctorFinding:
    return DoctorFinding(Severity.FAIL, subject, text, remedy)


_STYLES = {Severity.OK: "green", Severity.NOTE: "cyan", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


def print_findings(findings: Sequence[DoctorFinding], console: Console) -> None:
    """Print a line for each finding, its remedy below it, and the verdict last."""
    print_table(findings, console)
    console.print(_verdict(findings), highlight=False)


def print_table(findings: Sequence[DoctorFinding], console: Console) -> None:
    """Print a line for each finding, and its remedy below it."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=28)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", escape(finding.subject), escape(finding.text))
        if finding.remedy:
            table.add_row("", "", f"[{style}]do:[/] {escape(finding.remedy)}")
    console.print(table)


def findings_json(findings: Iterable[DoctorFinding]) -> bytes:
    """Encode one object: the worst level as the verdict, and all findings."""
    listed = list(findings)
    worst = max((finding.level for finding in listed), key=list(Severity).index, default=Severity.OK)
    body: dict[str, Any] = {"verdict": worst, "findings": [asdict(finding) for finding in listed]}
    return orjson.dumps(body, option=orjson.OPT_INDENT_2)


def _verdict(findings: Iterable[DoctorFinding]) -> str:
    levels = [finding.level for finding in findings]
    num_failing, num_warnings = levels.count(Severity.FAIL), levels.count(Severity.WARN)
    if num_failing:
        return f"Will not work as it is: {num_failing} failing, {num_warnings} to mend."
    if num_warnings:
        return f"Will work, with {num_warnings} to mend."
    return "Will work."
