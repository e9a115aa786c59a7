"""`sluice doctor --live URL`: watches a running server for some seconds, and says what bounds it."""

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import orjson
from rich.console import Console
from rich.markup import escape

from sluice.cli.doctor.findings import print_table
from sluice.cli.server import RunningServer, ServerError
from sluice.gateway.options.option import FAILED
from sluice.gateway.watch.live.bounds import BoundKind, LiveFinding, Observation, judge
from sluice.gateway.watch.live.findings import Severity
from sluice.gateway.watch.live.scrape import Change, Scrape

_INSTANCE_MODELS = 20
"""Most models whose configuration is asked for: those with requests that wait."""


def diagnose(server: RunningServer, seconds: float, *, is_json: bool) -> int:
    """Print the server's bottlenecks, as a table or as JSON, and return the exit code. Raises ServerError."""
    progress = Console(stderr=True)
    line = f"watching {server.url} for {seconds:g} s"
    if progress.is_terminal:
        with progress.status(escape(line)):
            seen = asyncio.run(_observe(server, seconds))
    else:
        progress.print(line, markup=False, highlight=False)
        seen = asyncio.run(_observe(server, seconds))
    findings = judge(seen)
    if is_json:
        sys.stdout.write(_as_json(seen, findings) + "\n")
    else:
        console = Console()
        print_table(findings, console)
        console.print(_verdict(findings), markup=False, highlight=False)
    return FAILED if any(each.level is Severity.FAIL for each in findings) else 0


async def _observe(server: RunningServer, seconds: float) -> Observation:
    async with server:
        before = await server.scrape()
        await asyncio.sleep(seconds)
        after, health = await server.scrape(), await server.health()
        return Observation(Change(before, after), health, await _count_instances(server, after))


async def _count_instances(server: RunningServer, scrape: Scrape) -> dict[str, int]:
    """Return the number of instances of the models with requests that wait, as far as this key may know it."""
    pending = scrape.by("model", "nv_inference_pending_request_count")
    found = {}
    for name in [name for name, count in sorted(pending.items()) if count][:_INSTANCE_MODELS]:
        with suppress(ServerError):
            groups = (await server.model_config(name)).get("instance_group") or [{}]
            found[name] = sum(int(each.get("count", 1)) * max(1, len(each.get("gpus", ()))) for each in groups)
    return found


def _verdict(findings: Sequence[LiveFinding]) -> str:
    first = findings[0]
    if first.bound is BoundKind.NONE:
        return "Nothing bounds this server."
    return f"Bound by: {first.bound.replace('_', ' ')} ({first.subject})."


def _as_json(seen: Observation, findings: Sequence[LiveFinding]) -> str:
    change = seen.change
    worst = max((each.level for each in findings), key=list(Severity).index)
    body: dict[str, Any] = {
        "verdict": worst,
        "bound": findings[0].bound,
        "seconds": round(change.seconds, 3),
        "tokens_per_s": round(change.rate("sluice_generation_tokens_total"), 3),
        "findings": [asdict(each) for each in findings],
    }
    return orjson.dumps(body, option=orjson.OPT_INDENT_2).decode()
