"""Every model loaded for real, as `sluice serve` would, and let go again."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from gateway.assembly import SharedResources, make_host_policies, make_rate_limiter, make_repository
from gateway.options.config import ServeConfig, read_config
from gateway.telemetry.metrics import GatewayMetrics
from serving.findings import Finding
from serving.repository.inspection.report import ModelReport
from serving.repository.repository import ALL_MODELS
from serving.repository.types import IndexEntry, ModelState


def with_loads(reports: Sequence[ModelReport], paths: Sequence[str], *, has_namespaces: bool) -> list[ModelReport]:
    """The reports with what loading found. Raises OptionError for variables that are wrong, SluiceError as a start."""
    flags: dict[str, str | bool | list[str]] = {"--model-repository": list(paths), "--model-control-mode": "explicit"}
    if has_namespaces:
        flags["--model-namespacing"] = True
    rows = asyncio.run(_load(read_config(flags)))
    return [_with_load(report, [row for row in rows if row.name == report.name]) for report in reports]


async def _load(config: ServeConfig) -> list[IndexEntry]:
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


def _with_load(report: ModelReport, rows: Sequence[IndexEntry]) -> ModelReport:
    ready = tuple(row.version for row in rows if row.state is ModelState.READY)
    failed = [row for row in rows if row.state is not ModelState.READY]
    found = [
        Finding(f"version {row.version} cannot be loaded: {row.reason}" if row.reason else "it was not loaded")
        for row in failed
        if not any(_is_same(each, row.reason) for each in report.errors)
    ]
    return replace(report, versions=ready or report.versions).with_errors(*found)


def _is_same(known: Finding, reason: str) -> bool:
    """Whether the index's reason, which begins with a word for its kind, is what was found without loading."""
    return known.message in reason or reason.partition(": ")[2] in known.message
