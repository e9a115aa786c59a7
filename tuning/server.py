"""Starts `sluice serve` as a process of its own, and asks it for its figures."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from sluice.tuning.errors import TrialFailedError

START_TIMEOUT_S = 1800.0
"""Seconds that a start may take: loads and downloads of models count."""
_STOP_TIMEOUT_S = 30.0
_ASK_TIMEOUT_S = 30.0
_LISTENING = re.compile(r"Listening on (\S+) \(metrics ([^,)]+)")
_PORTS = ("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0")


class Metrics(NamedTuple):
    """A page of metrics: name, labels and value of each sample."""

    samples: list[tuple[str, dict[str, str], float]]

    def values(self, name: str) -> list[float]:
        """Return the values of a metric, one for each set of labels."""
        return [value for each, _, value in self.samples if each == name]

    def labels(self, name: str) -> list[dict[str, str]]:
        """Return the sets of labels of a metric."""
        return [labels for each, labels, _ in self.samples if each == name]


@dataclass(frozen=True, slots=True)
class TrialServer:
    """A server that is ready."""

    url: str
    metrics_url: str
    process: psutil.Process
    log: Path

    def memory_bytes(self) -> float:
        """Return the memory of all its processes; pages that several share count once. Raises TrialFailedError where
        it has ended."""
        total = 0
        try:
            processes = (self.process, *self.process.children(recursive=True))
        except psutil.Error:
            raise TrialFailedError(f"the server has ended; see {self.log}") from None
        for process in processes:
            with suppress(psutil.Error):  # it has ended meanwhile
                total += process.memory_full_info().pss
        return float(total)

    async def metrics(self) -> "Metrics":
        """Return its metrics."""
        text = (await self._get(self.metrics_url)).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return Metrics([(sample.name, sample.labels, sample.value) for sample in samples])

    async def get_json(self, path: str) -> Any:
        """Return what a path answers. Raises TrialFailedError where it is not 200."""
        return (await self._get(f"{self.url}{path}")).json()

    async def _get(self, url: str) -> httpx.Response:
        try:
            async with httpx.AsyncClient(timeout=_ASK_TIMEOUT_S, trust_env=False) as client:
                answer = await client.get(url)
        except httpx.HTTPError as error:
            raise TrialFailedError(f"{url} does not answer ({error or type(error).__name__}); see {self.log}") from None
        if answer.status_code != 200:
            raise TrialFailedError(f"{url} answers {answer.status_code}: {answer.text[:200]}")
        return answer


@asynccontextmanager
async def running_server(arguments: Sequence[str], log: Path) -> AsyncIterator[TrialServer]:
    """Start a server on free ports, yield it once it is ready, and stop it. Raises TrialFailedError where it does not
    start."""
    command = (sys.executable, "-m", "sluice.cli", "serve", *arguments, *_PORTS)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=errors
        )
    try:
        url, metrics_url = await _await_ready(process, log)
        yield TrialServer(url, metrics_url, psutil.Process(process.pid), log)
    finally:
        await asyncio.shield(_stop(process))


async def _await_ready(process: asyncio.subprocess.Process, log: Path) -> tuple[str, str]:
    assert process.stdout is not None, "it is a pipe"
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            listening = _LISTENING.match((await process.stdout.readline()).decode())
            is_ready = listening is not None and bool(await process.stdout.readline())
    except TimeoutError:
        raise TrialFailedError(f"the server was not ready within {START_TIMEOUT_S:g} s; see {log}") from None
    if listening is None or not is_ready:
        await process.wait()
        raise TrialFailedError(f"the server did not start: {_last_line(log)}")
    return listening[1], listening[2]


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip()} (see {log})" if lines else f"it ended without a word (see {log})"


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End the server; kill it where it does not end in time."""
    with suppress(ProcessLookupError):
        process.terminate()
    assert process.stdout is not None, "it is a pipe"
    try:
        async with asyncio.timeout(_STOP_TIMEOUT_S):
            await process.stdout.read()
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
