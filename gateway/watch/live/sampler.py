"""Samples of the server, each with what has come since the one before."""

import os
from dataclasses import dataclass
from time import perf_counter, time

import psutil

from sluice import __version__
from sluice.gateway.front.path_masking import hide_paths
from sluice.gateway.plane.health import Phase
from sluice.gateway.server import Server
from sluice.gateway.watch.live.alerts import AlertJudge
from sluice.gateway.watch.live.engines import EngineWatch, ask_views, describe_replicas, list_engines
from sluice.gateway.watch.live.sample import EnginePart, LiveSample, ServerPart, ThroughputPart
from sluice.gateway.watch.live.tables import (
    describe_keys,
    describe_models,
    describe_tenants,
    list_sequences,
    read_quotas,
)
from sluice.gateway.watch.live.totals import LatencyWindow, Totals, read_totals
from sluice.gateway.watch.logs.ring import find_ring
from sluice.pipelines.llm.model import language_models
from sluice.pipelines.text.sessions import MAX_LISTED, SessionRow, merge_rows

MAX_WARNINGS = 100
_LEAST_S = 1e-3


@dataclass(frozen=True)
class WatchedServer:
    """A server, with what samples need besides."""

    server: Server
    judge: AlertJudge
    heartbeat_timeout_s: float
    num_workers: int
    """0 for a server of one process."""


class LiveSampler:
    """Samples a server. Two samplers know nothing of each other, and each counts from its own last sample."""

    def __init__(self, watched: WatchedServer, interval_s: float) -> None:
        """`interval_s` is the time from one sample to the next."""
        self.interval_s = interval_s
        self._watched = watched
        self._server = watched.server
        self._watch = EngineWatch(watched.heartbeat_timeout_s)
        self._window = LatencyWindow()
        self._totals = Totals()
        self._at = perf_counter()

    async def begin(self) -> None:
        """Record the current counts, from which the first sample counts."""
        await self._advance()
        self._window.update(self._at, self._totals, ())

    async def sample(self) -> LiveSample:
        """Return the server's current work, and its work since the last call."""
        before, began = self._totals, self._at
        parts = await self._advance()
        elapsed_s = max(self._at - began, _LEAST_S)
        server, totals, quotas = self._server, self._totals, self._server.accounts.quotas
        requests = await server.live.list_all()
        engines = list_engines(language_models(server.plane.repository.models()))
        ring = find_ring()
        return LiveSample(
            time=round(time(), 3),
            interval_s=self.interval_s,
            elapsed_s=round(elapsed_s, 3),
            server=self._describe_server(),
            throughput=_throughput(parts, before, totals, elapsed_s),
            latency=self._window.update(self._at, totals, self._watch.waits_s),
            engines=parts,
            sequences=list_sequences(requests),
            models=describe_models(server.plane.repository),
            tenants=describe_tenants(requests, self._watch.tenants, read_quotas(quotas, "tenant"), elapsed_s),
            sessions=await self._sessions(),
            keys=describe_keys(read_quotas(quotas, "key")),
            replicas=list(describe_replicas(engines, self._watched.heartbeat_timeout_s)),
            alerts=await self._watched.judge.judge(),
            warnings=[] if ring is None else ring.warnings(MAX_WARNINGS),
        )

    async def _sessions(self) -> list[SessionRow]:
        """Return the sessions of all processes that sent a request last."""
        rows, elsewhere = self._server.metrics.sessions.rows(), self._server.elsewhere
        return rows if elsewhere is None else merge_rows([*rows, *await elsewhere.list_sessions()], MAX_LISTED)

    async def _advance(self) -> list[EnginePart]:
        """Ask the engines, and count until now. Returns the engines as they are."""
        began, server = self._at, self._server
        engines = list_engines(language_models(server.plane.repository.models()))
        await ask_views(engines, self.interval_s)
        self._at = perf_counter()
        parts = self._watch.describe(engines, max(self._at - began, _LEAST_S))
        elsewhere = () if server.elsewhere is None else server.elsewhere.families()
        self._totals = read_totals((*server.metrics.collect(), *elsewhere))
        return parts

    def _describe_server(self) -> ServerPart:
        problem = self._server.plane.health.why_not_ready()
        match self._server.plane.health.phase:
            case Phase.LOADING:
                state = "loading"
            case Phase.DRAINING:
                state = "draining"
            case Phase.SERVING:
                state = "unready" if problem else "ready"
        started_at = psutil.Process().create_time()
        return ServerPart(
            version=__version__,
            pid=os.getpid(),
            started_at=round(started_at, 3),
            uptime_s=round(time() - started_at, 3),
            state=state,
            reason=hide_paths(problem),
            num_workers=self._watched.num_workers,
        )


def _throughput(engines: list[EnginePart], before: Totals, totals: Totals, elapsed_s: float) -> ThroughputPart:
    def rate(now: float, last: float) -> float:
        return round(max(0.0, now - last) / elapsed_s, 3)

    return ThroughputPart(
        prompt_tokens_per_s=round(sum(each.prompt_tokens_per_s for each in engines), 3),
        cached_tokens_per_s=round(sum(each.cached_tokens_per_s for each in engines), 3),
        generated_tokens_per_s=round(sum(each.generated_tokens_per_s for each in engines), 3),
        requests_per_s=rate(totals.num_requests, before.num_requests),
        errors_per_s=rate(totals.num_errors, before.num_errors),
        open_streams=int(totals.num_open),
        running=sum(each.running for each in engines),
        waiting=sum(each.waiting for each in engines),
    )
