"""Watches the server during a run: its queue and batch over time, where requests spent their time, the energy."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import urlsplit

import msgspec

from sluice.addresses import host_and_port, is_loopback
from sluice.load.config import LoadConfig, LoadConfigError
from sluice.load.connection import ConnectionPool, RunError, get
from sluice.load.watch.energy import Energy, EnergyWatch
from sluice.load.watch.metrics_page import Dialect, MetricsReading, dialect_of, read_page

INTERVAL_S = 0.5
PATIENCE_S = 5.0
"""Longest wait for a page."""
AUTO = "auto"
"""Stands for a URL: where the server itself says that its metrics are, else its own /metrics."""


@dataclass(frozen=True, slots=True)
class ServerSample:
    """The requests in the server at a moment of the run's clock."""

    at_s: float
    running: float
    waiting: float


@dataclass(frozen=True, slots=True)
class ServerSide:
    """The server's metrics of a run."""

    software: str
    url: str
    phases_ms: dict[str, float]
    """Mean time of a request in each phase."""
    num_requests: int
    """Requests that the phases are of."""
    batch: float | None
    """Mean number of sequences in a step."""
    num_gpus: int | None
    samples: tuple[ServerSample, ...]


@dataclass(frozen=True, slots=True)
class Watched:
    """The findings beside the requests. `missing` says why the server's side is unknown."""

    server: ServerSide | None = None
    missing: str = ""
    energy: Energy | None = None


class _Metrics(msgspec.Struct):
    port: int
    path: str


class _Root(msgspec.Struct):
    metrics: _Metrics


@dataclass(slots=True)
class Watcher:
    """Watches from `async with` to its end. `watched` has the result then. A page that fails ends no run."""

    config: LoadConfig
    model: str
    now: Callable[[], float]
    watched: Watched = field(default_factory=Watched)
    _energy: EnergyWatch | None = None
    _energy_missing: str = ""
    _source: "_Source | None" = None
    _first: MetricsReading | None = None
    _samples: list[ServerSample] = field(default_factory=list)
    _missing: str = ""
    _polling: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        if self.config.metrics_url is not None:
            try:
                self._source = await _find(self.config, self.model, self.now)
                self._first = await self._source.read()
            except (RunError, LoadConfigError, ValueError) as error:
                self._missing = str(error)
        if self.config.measures_energy:
            if is_loopback(self.config.target.url):
                self._energy = EnergyWatch()
            else:
                self._energy_missing = "the server is on another machine"
        if self._first is not None or self._energy is not None:
            self._polling = asyncio.create_task(self._poll())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        energy = Energy({}, self._energy_missing) if self._energy_missing else None
        if self._energy is not None:
            energy = self._energy.finish()
        self.watched = Watched(await self._server_side(), self._missing, energy)
        if self._source is not None:
            self._source.pool.close()

    async def _poll(self) -> None:
        while True:
            if self._energy is not None:
                self._energy.update()
            if self._first is not None and self._source is not None:
                with suppress(RunError, ValueError):  # the last reading says whether the server still has a page
                    page = await self._source.read()
                    self._samples.append(ServerSample(self.now(), page.running, page.waiting))
            await asyncio.sleep(INTERVAL_S)

    async def _server_side(self) -> ServerSide | None:
        if self._source is None or self._first is None:
            return None
        try:
            last = await self._source.read()
        except (RunError, ValueError) as error:
            self._missing = str(error)
            return None
        totals = {phase: total.since(self._first.phases[phase]) for phase, total in last.phases.items()}
        return ServerSide(
            software=self._source.dialect.software,
            url=self._source.pool.url,
            phases_ms={phase: total.mean * 1e3 for phase, total in totals.items() if total.mean is not None},
            num_requests=int(max((total.count for total in totals.values()), default=0)),
            batch=last.batch.since(self._first.batch).mean,
            num_gpus=last.num_gpus,
            samples=tuple(self._samples),
        )


@dataclass(slots=True)
class _Source:
    """A page of metrics that can be read."""

    pool: ConnectionPool
    config: LoadConfig
    path: str
    dialect: Dialect
    model: str

    async def read(self) -> MetricsReading:
        """Read the page. Raises RunError, or ValueError for a page that is none."""
        return read_page(await _page(self.pool, self.config, self.path), self.dialect, self.model)


async def _page(pool: ConnectionPool, config: LoadConfig, path: str) -> str:
    target = replace(config.target, url=pool.url, timeout_s=PATIENCE_S)
    return (await get(pool, target, path)).decode(errors="replace")


async def _find(config: LoadConfig, model: str, now: Callable[[], float]) -> _Source:
    """Find the page. Raises RunError where there is none that is known."""
    assert config.metrics_url is not None
    url = await _address(config, now) if config.metrics_url == AUTO else config.metrics_url
    parts = urlsplit(url)
    pool = ConnectionPool(f"{parts.scheme}://{parts.netloc}", now)
    try:
        dialect = dialect_of(await _page(pool, config, parts.path or "/metrics"))
        if dialect is None:
            raise RunError(f"{url} has none of the figures that are known of Sluice, vLLM, SGLang or TGI")
    except BaseException:
        pool.close()
        raise
    return _Source(pool, config, parts.path or "/metrics", dialect, model)


async def _address(config: LoadConfig, now: Callable[[], float]) -> str:
    """Return the address of the metrics: Sluice has it in its overview at `/`; others have /metrics beside their
    API."""
    url = config.target.url.rstrip("/")
    pool = ConnectionPool(url, now)
    try:
        metrics = msgspec.json.decode(await _page(pool, config, "/"), type=_Root).metrics
    except (RunError, msgspec.DecodeError):
        return f"{url}/metrics"
    finally:
        pool.close()
    parts = urlsplit(url)
    return f"http://{host_and_port(parts.hostname or '', metrics.port)}{metrics.path}"
