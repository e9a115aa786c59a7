"""`sluice repository check`: reports what each model of a repository would do if it were served."""

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TextIO

import orjson

from sluice.cli.errors import CommandError, reports_errors
from sluice.errors import SluiceError
from sluice.gateway.options.option import FAILED, USAGE_ERROR
from sluice.serving.backend import RuntimeReport
from sluice.serving.backends.python.backend import find_python_based
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.findings import Finding
from sluice.serving.repository.inspection import ModelReport, Verdict, inspect_repositories
from sluice.serving.repository.managed_model import IndexEntry, ModelState
from sluice.serving.repository.pruning import check_roots
from sluice.serving.repository.roots import open_roots
from sluice.serving.repository.stores.location import local_path, store_location

ServeFlag = str | bool | list[str]
_COLOURS = {Verdict.OK: "32", Verdict.NOTES: "33", Verdict.ERROR: "31"}
_DIM = "2"


@reports_errors("sluice repository check")
def check(arguments: argparse.Namespace) -> int:
    """Print the report and return the exit code."""
    try:
        reports = _inspect(arguments)
        if arguments.load:
            reports = add_load_results(reports, _serve_flags(arguments))
    except (SluiceError, OSError) as error:
        raise CommandError(str(error), USAGE_ERROR) from None
    if arguments.json:
        sys.stdout.write(reports_json(reports).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in report_lines(reports, AnsiStyle(sys.stdout)))
    return _exit_code(reports, is_strict=arguments.strict)


def _inspect(arguments: argparse.Namespace) -> list[ModelReport]:
    check_roots([Path(local_path(path)) for path in arguments.paths if store_location(path) is None])
    registry = BackendRegistry()
    if arguments.backend_directory is not None:
        registry.register_missing(find_python_based(Path(arguments.backend_directory)))
    roots = open_roots(arguments.paths, None, 0.0)
    try:
        return inspect_repositories(roots, registry, has_namespaces=arguments.model_namespacing)
    finally:
        for root in roots:
            root.close()


def _exit_code(reports: Sequence[ModelReport], *, is_strict: bool) -> int:
    verdicts = {report.verdict for report in reports}
    failing = {Verdict.ERROR, Verdict.NOTES} if is_strict else {Verdict.ERROR}
    return FAILED if verdicts & failing else 0


def _serve_flags(arguments: argparse.Namespace) -> dict[str, ServeFlag]:
    """Return the flags with which `sluice serve` loads the models when it is asked to."""
    flags: dict[str, ServeFlag] = {
        "--model-repository": list(arguments.paths),
        "--model-control-mode": "explicit",
    }
    if arguments.model_namespacing:
        flags["--model-namespacing"] = True
    if arguments.backend_directory is not None:
        flags["--backend-directory"] = arguments.backend_directory
    return flags


def add_load_results(reports: Sequence[ModelReport], flags: Mapping[str, ServeFlag]) -> list[ModelReport]:
    """Load every model as `sluice serve` would with these flags, unload it, and add the failures to the reports.

    Raises ConfigError for a bad SLUICE_ variable, and the SluiceError of a start that fails.
    """
    rows = asyncio.run(_load(flags))
    return [_add_load_result(report, [row for row in rows if row.name == report.name]) for report in reports]


async def _load(flags: Mapping[str, ServeFlag]) -> list[IndexEntry]:
    # Imported only here: a check without --load reads files and imports no server.
    from sluice.gateway.backends import SharedResources, make_host_policies, make_rate_limiter, make_repository
    from sluice.gateway.options.config import read_config
    from sluice.gateway.telemetry.metrics import GatewayMetrics
    from sluice.serving.repository.repository import ALL_MODELS

    config = read_config(flags)
    shared = SharedResources(
        GatewayMetrics(),
        rate_limiter=make_rate_limiter(config.instances),
        host_policies=make_host_policies(config.instances),
    )
    repository = make_repository(config, shared)
    try:
        await repository.start([ALL_MODELS])
        return repository.index()
    finally:
        await repository.close()


def _add_load_result(report: ModelReport, rows: Sequence[IndexEntry]) -> ModelReport:
    ready = tuple(row.version for row in rows if row.state is ModelState.READY)
    failed = [row for row in rows if row.state is not ModelState.READY]
    found = [
        Finding(f"version {row.version} cannot be loaded: {row.reason}" if row.reason else "it was not loaded")
        for row in failed
        if not any(_is_same(each, row.reason) for each in report.errors)
    ]
    return replace(report, versions=ready or report.versions).with_errors(*found)


def _is_same(known: Finding, reason: str) -> bool:
    """Whether inspection already found what the index gives as its reason, which begins with the kind of error."""
    return known.message in reason or reason.partition(": ")[2] in known.message


class AnsiStyle:
    """ANSI colours on a terminal, plain text elsewhere."""

    def __init__(self, stream: TextIO) -> None:
        self._is_coloured = stream.isatty()

    def __call__(self, text: str, code: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self._is_coloured else text


def report_lines(reports: Sequence[ModelReport], style: AnsiStyle) -> Iterator[str]:
    """Yield a line for each model with its findings below it, and a summary."""
    width = max((len(report.name) for report in reports), default=0)
    for report in reports:
        verdict = style(f"{report.verdict.value:<5}", _COLOURS[report.verdict])
        yield f"{verdict}  {report.name:<{width}}  {_backend_and_versions(report)}".rstrip()
        if report.runtime is not None:
            yield from _runtime_lines(report.runtime)
        for each in report.errors:
            yield from _finding_lines(each, report, style("error", _COLOURS[Verdict.ERROR]), style)
        for each in report.notes:
            yield from _finding_lines(each, report, style("note", _COLOURS[Verdict.NOTES]), style)
    yield ""
    yield _summary(reports)


def _summary(reports: Sequence[ModelReport]) -> str:
    counts = Counter(report.verdict for report in reports)
    total = f"{len(reports)} model{'' if len(reports) == 1 else 's'}"
    return (
        f"{total}: {counts[Verdict.OK]} ok, {counts[Verdict.NOTES]} with notes, {counts[Verdict.ERROR]} would not load"
    )


def _backend_and_versions(report: ModelReport) -> str:
    if not report.backend:
        return ""
    versions = ", ".join(map(str, report.versions))
    return f"{report.backend}, version{'' if len(report.versions) == 1 else 's'} {versions or 'none'}"


def _runtime_lines(runtime: RuntimeReport) -> Iterator[str]:
    yield f"       runtime: {runtime.runtime}, as {runtime.reason}"
    if runtime.obeyed:
        yield f"       obeyed: {', '.join(runtime.obeyed)}"
    yield from (f"       without effect: {note}" for note in runtime.unused)


def _finding_lines(finding: Finding, report: ModelReport, kind: str, style: AnsiStyle) -> Iterator[str]:
    text = replace(finding, message=finding.message.strip(), fix="").text(_file(finding, report))
    first, *others = [line for line in text.splitlines() if line]
    yield f"       {kind}: {first}"
    yield from (f"         {line}" for line in others)
    if finding.fix:
        yield f"         {style('write:', _DIM)} {finding.fix}"


def _file(finding: Finding, report: ModelReport) -> str:
    return report.config_file if finding.line is not None else ""


def reports_json(reports: Sequence[ModelReport]) -> bytes:
    """Encode every report with the places and fixes of its findings, and the counts of the summary."""
    counts = Counter(report.verdict for report in reports)
    body = {
        "models": [_model_json(report) for report in reports],
        "summary": {"models": len(reports), **{verdict.value: counts[verdict] for verdict in Verdict}},
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2)


def _model_json(report: ModelReport) -> dict[str, Any]:
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
