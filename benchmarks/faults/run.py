"""Tries each fault on each server, and writes what happened as tables."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.faults import garbage, killed, leaving, overload, preemption, startup, stopped
from benchmarks.faults.catalogue import SERVERS, Setup
from benchmarks.faults.client import SHORT, WHOLE, serve_once
from benchmarks.faults.findings import Finding, Record, read_records, render, write_record
from benchmarks.faults.server import Adapter, FaultServer, Limits, running
from benchmarks.figures import BenchmarkError, Figure, ReportProgress
from benchmarks.models import model_s
from sluice.gateway.checkpoint import find_checkpoint


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and the limits of the servers that it is tried on."""

    title: str
    limits: Limits
    measure: Callable[[FaultServer], Coroutine[Any, Any, list[Finding]]]
    needs_fresh: bool = False
    """Whether it needs a server that has just started."""


def _fault(title: str, module: ModuleType, *, needs_fresh: bool = False) -> Fault:
    return Fault(title, module.LIMITS, module.measure, needs_fresh)


SERVES_S = 30.0
"""Seconds in which a server must give a short answer after a fault to take the next one."""


FAULTS: Mapping[str, Fault] = {
    "startup": _fault("Startup", startup, needs_fresh=True),
    "leaving": _fault("32 clients leave their streams", leaving),
    "overload": _fault("1,024 requests at once, of which 32 run", overload),
    "garbage": _fault("Garbage", garbage),
    "stopped": _fault("The engine stands still (SIGSTOP)", stopped),
    "killed": _fault("`kill -9` of the engine", killed),
    "preemption": _fault("A KV cache for 8 of 32 requests", preemption),
}
"""Faults by their names in --only, in the order of their tables."""


def measure(folder: Path, vllm_python: Path | None, only: str, report: ReportProgress) -> list[Figure]:
    """Try the faults on the servers that `only` names: all faults where it names none, and all servers likewise."""
    faults, servers = choose(only)
    checkpoint = model_s(folder / "models", find_checkpoint(None)).resolve()
    setup = Setup(folder.resolve(), vllm_python, checkpoint, report)
    figures: list[Figure] = []
    for server in servers:
        adapter = SERVERS[server].make(setup)
        with closing(_Bench(adapter, setup)) as bench:
            for key in faults:
                record = bench.try_fault(FAULTS[key])
                write_record(folder / "faults", record)
                figures += record.figures()
    _write_tables(folder)
    return figures


def choose(only: str) -> tuple[list[str], list[str]]:
    """Return the keys of faults and of servers among the words of `only`. Raises BenchmarkError for any other word."""
    words = only.split()
    unknown = [word for word in words if word not in FAULTS and word not in SERVERS]
    if unknown:
        raise BenchmarkError(f"--only knows no {unknown[0]}; there are {', '.join((*FAULTS, *SERVERS))}")
    return _among(words, list(FAULTS)), _among(words, list(SERVERS))


def _among(words: Sequence[str], known: Sequence[str]) -> list[str]:
    return [key for key in known if key in words] or list(known)


class _Bench:
    """Holds a server, which takes one fault after the other as long as it serves and has the limits for it."""

    def __init__(self, adapter: Adapter, setup: Setup) -> None:
        self._adapter = adapter
        self._setup = setup
        self._stack = ExitStack()
        self._server: FaultServer | None = None
        self._limits: Limits | None = None

    def try_fault(self, fault: Fault) -> Record:
        """Try a fault. A server that cannot take part says why in its table."""
        self._setup.report(f"{self._adapter.name}: {fault.title} ...")
        try:
            findings = asyncio.run(fault.measure(self._serving(fault)))
        except BenchmarkError as error:
            findings = [Finding("not measured", str(error))]
        for finding in findings:
            self._setup.report(f"  {finding.measure}: {finding}")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return Record(fault.title, self._adapter.name, self._adapter.version, now, tuple(findings))

    def _serving(self, fault: Fault) -> FaultServer:
        is_whole = self._server is not None and asyncio.run(serve_once(self._server, SERVES_S))[0] in (WHOLE, SHORT)
        if self._server is not None and is_whole and self._limits == fault.limits and not fault.needs_fresh:
            return self._server
        self.close()
        logs = self._setup.folder / "faults-logs"
        self._limits = fault.limits
        self._server = self._stack.enter_context(running(self._adapter, self._setup.checkpoint, logs, fault.limits))
        return self._server

    def close(self) -> None:
        """End the server."""
        self._server = None
        self._stack.close()


def _write_tables(folder: Path) -> None:
    titles = [fault.title for fault in FAULTS.values()]
    names = [server.name for server in SERVERS.values()]
    (folder / "faults.md").write_text(render(read_records(folder / "faults"), titles, names))
