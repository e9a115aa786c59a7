"""The findings for people, one screen, and for machines."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from cli.doctor.findings import Finding, Level

_STYLES = {Level.OK: "green", Level.NOTE: "cyan", Level.WARN: "yellow", Level.FAIL: "bold red"}


def show(findings: Sequence[Finding], console: Console) -> None:
    """A line each, what to do below it, and the verdict last."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, max_width=28)
    table.add_column(overflow="fold")
    for finding in findings:
        style = _STYLES[finding.level]
        table.add_row(f"[{style}]{finding.level}[/]", _plain(finding.subject), _plain(finding.text))
        if finding.remedy:
            table.add_row("", "", f"[{style}]do:[/] {_plain(finding.remedy)}")
    console.print(table)
    console.print(verdict(findings), highlight=False)


def verdict(findings: Iterable[Finding]) -> str:
    """In one sentence, what to expect."""
    counts = {level: sum(1 for finding in findings if finding.level is level) for level in (Level.FAIL, Level.WARN)}
    if counts[Level.FAIL]:
        return f"Will not work as it is: {counts[Level.FAIL]} failing, {counts[Level.WARN]} to mend."
    if counts[Level.WARN]:
        return f"Will work, with {counts[Level.WARN]} to mend."
    return "Will work."


def as_json(findings: Iterable[Finding]) -> bytes:
    """One object: the worst level, and the findings."""
    listed = list(findings)
    worst = max((finding.level for finding in listed), key=list(Level).index, default=Level.OK)
    body: dict[str, Any] = {"verdict": worst, "findings": [_fields(finding) for finding in listed]}
    return orjson.dumps(body, option=orjson.OPT_INDENT_2)


def _fields(finding: Finding) -> dict[str, str]:
    return {"level": finding.level, "subject": finding.subject, "text": finding.text, "remedy": finding.remedy}


def _plain(text: str) -> str:
    """What rich would read as markup."""
    return text.replace("[", r"\[")
