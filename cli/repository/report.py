"""Reports on models as text for people and as JSON for machines."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any, TextIO

import orjson

from serving.backend import RuntimeReport
from serving.findings import Finding
from serving.repository.inspection import ModelReport, Verdict

_COLOURS = {Verdict.OK: "32", Verdict.NOTES: "33", Verdict.ERROR: "31"}
_DIM = "2"


class Style:
    """Colours where somebody looks, none in a file."""

    def __init__(self, stream: TextIO) -> None:
        self._is_coloured = stream.isatty()

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_coloured else text


def lines(reports: Sequence[ModelReport], style: Style) -> Iterator[str]:
    """A line for each model, below it what there is to say, and a summary."""
    width = max((len(report.name) for report in reports), default=0)
    for report in reports:
        verdict = style(f"{report.verdict.value:<5}", _COLOURS[report.verdict])
        yield f"{verdict}  {report.name:<{width}}  {_what(report)}".rstrip()
        if report.runtime is not None:
            yield from _runtime(report.runtime)
        for each in report.errors:
            yield from _finding(each, report, style("error", _COLOURS[Verdict.ERROR]), style)
        for each in report.notes:
            yield from _finding(each, report, style("note", _COLOURS[Verdict.NOTES]), style)
    yield ""
    yield summary(reports)


def summary(reports: Sequence[ModelReport]) -> str:
    """How many are what, in one line."""
    counts = Counter(report.verdict for report in reports)
    total = f"{len(reports)} model{'' if len(reports) == 1 else 's'}"
    return (
        f"{total}: {counts[Verdict.OK]} ok, {counts[Verdict.NOTES]} with notes, {counts[Verdict.ERROR]} would not load"
    )


def as_json(reports: Sequence[ModelReport]) -> bytes:
    """Every report with places and remedies, and the counts of the summary."""
    counts = Counter(report.verdict for report in reports)
    body = {
        "models": [_model(report) for report in reports],
        "summary": {"models": len(reports), **{verdict.value: counts[verdict] for verdict in Verdict}},
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2)


def _what(report: ModelReport) -> str:
    if not report.backend:
        return ""
    versions = ", ".join(map(str, report.versions))
    return f"{report.backend}, version{'' if len(report.versions) == 1 else 's'} {versions or 'none'}"


def _runtime(runtime: RuntimeReport) -> Iterator[str]:
    yield f"       runtime: {runtime.runtime}, as {runtime.reason}"
    if runtime.obeyed:
        yield f"       obeyed: {', '.join(runtime.obeyed)}"
    yield from (f"       without effect: {note}" for note in runtime.unused)


def _finding(finding: Finding, report: ModelReport, kind: str, style: Style) -> Iterator[str]:
    said = replace(finding, message=finding.message.strip(), fix="").text(_file(finding, report))
    first, *others = [line for line in said.splitlines() if line]
    yield f"       {kind}: {first}"
    yield from (f"         {line}" for line in others)
    if finding.fix:
        yield f"         {style('write:', _DIM)} {finding.fix}"


def _file(finding: Finding, report: ModelReport) -> str:
    return report.config_file if finding.line is not None else ""


def _model(report: ModelReport) -> dict[str, Any]:
    return {
        "name": report.name,
        "folders": report.folders,
        "verdict": report.verdict.value,
        "backend": report.backend,
        "versions": report.versions,
        "errors": [_finding_json(each, report) for each in report.errors],
        "notes": [_finding_json(each, report) for each in report.notes],
        **({"runtime": asdict(report.runtime)} if report.runtime is not None else {}),
    }


def _finding_json(finding: Finding, report: ModelReport) -> dict[str, Any]:
    return {
        "message": finding.message,
        "field": finding.path,
        "file": _file(finding, report),
        "line": finding.line,
        "column": finding.column,
        "write": finding.fix,
    }
