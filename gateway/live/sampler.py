"""Samples of the server, each with what has come since the one before."""

import os
from dataclasses import dataclass
from time import perf_counter, time

import psutil

from sluice import __version__
from sluice.gateway.health import Phase
from sluice.gateway.live.alerts import AlertJudge
from sluice.gateway.live.engines import EngineWatch, ask_views, describe_replicas, list_engines
from sluice.gateway.live.sample import EnginePart, LiveSample, ServerPart, ThroughputPart
from sluice.gateway.live.tables import (
    describe_keys,
    describe_models,
    describe_tenants,
    list_sequences,
    read_quotas,
)
from sluice.gateway.live.totals import LatencyWindow, Totals, read_totals
from sluice.gateway.path_masking import hide_paths
from sluice.gateway.service import InferenceService
from sluice.gateway.telemetry.log_ring import find_ring

MAX_WARNINGS = 100
_LEAST_S = 1e-3


@dataclass(frozen=True)
class WatchedServer:
    """A server, with what samples need besides its service."""

    service: InferenceService
    judge: AlertJudge
    heartbeat_timeout_s: float
    num_workers: int
    """0 for a server of one process."""


class LiveSampler:
    """Samples a server. Two samplers know nothing of each other, and each counts from its own last sample."""

    def __init__(self, server: WatchedServer, interval_s: float) -> None:
        """`interval_s` is the time from one sample to the next."""
        self.interval_s = interval_s
        self._server = server
        self._service = server.service
        self._watch = EngineWatch(server.heartbeat_timeout_s)
        self._window = LatencyWindow()
        self._totals = Totals()
        self._at = perf_counter()

    async def begin(self) -> None:
        """Note what there is now. The first sample counts from here."""
        await self._advance()
        self._window.update(self._at, self._totals, ())

    async def sample(self) -> LiveSample:
        """Return what the server does now, and has done since the last call."""
        before, began = self._totals, self._at
        parts = await self._advance()
        elapsed_s = max(self._at - began, _LEAST_S)
        service, totals = self._service, self._totals
        requests = await service.live.list_all()
        engines = list_engines(service.language_models())
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
            models=describe_models(service.repository),
            tenants=describe_tenants(requests, self._watch.tenants, read_quotas(service.quotas, "tenant"), elapsed_s),
            keys=describe_keys(read_quotas(service.quotas, "key")),
            replicas=list(describe_replicas(engines, self._server.heartbeat_timeout_s)),
            alerts=await self._server.judge.judge(),
            warnings=[] if ring is None else ring.warnings(MAX_WARNINGS),
        )

    async def _advance(self) -> list[EnginePart]:
        """Ask the engines, and count until now. Returns the engines as they are."""
        began, service = self._at, self._service
        engines = list_engines(service.language_models())
        await ask_views(engines, self.interval_s)
        self._at = perf_counter()
        parts = self._watch.describe(engines, max(self._at - began, _LEAST_S))
        self._totals = read_totals((*service.metrics.collect(), *service.counted_elsewhere()))
        return parts

    def _describe_server(self) -> ServerPart:
        readiness = self._service.readiness()
        match self._service.phase:
            case Phase.LOADING:
                state = "loading"
            case Phase.DRAINING:
                state = "draining"
            case Phase.SERVING:
                state = "ready" if readiness.is_ok else "unready"
        started_at = psutil.Process().create_time()
        return ServerPart(
            version=__version__,
            pid=os.getpid(),
            started_at=round(started_at, 3),
            uptime_s=round(time() - started_at, 3),
            state=state,
            reason=hide_paths(readiness.reason),
            num_workers=self._server.num_workers,
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
