"""A worker's process: takes connections of the shared port, and follows the host's link until that closes."""

import asyncio
import logging
import socket
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.assembly import make_application, make_worker_server, measure_process
from sluice.gateway.front.http.server import HttpServer
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.routes import RouteOptions
from sluice.gateway.options.serving import RepositoryOptions
from sluice.gateway.options.streams import StreamOptions
from sluice.gateway.options.telemetry import LoggingOptions, TraceOptions
from sluice.gateway.process_settings import favour_event_loop
from sluice.gateway.workers.counts import read_counts
from sluice.gateway.workers.dispatch import Dispatch
from sluice.gateway.workers.forwarding import HostApplication
from sluice.gateway.workers.messages import (
    AskCounts,
    AskRequests,
    AskTimelines,
    Decision,
    Drain,
    FoundTimelines,
    Requests,
    Served,
    ToWorker,
)
from sluice.gateway.workers.models import LinkedModels
from sluice.gateway.workers.quotas import HostQuotas
from sluice.gateway.workers.wire import Wire
from sluice.heap import settle_objects

log = logging.getLogger(__name__)

REPORT_S = 1.0
"""How often the host hears what this worker has counted, and that it lives."""
_FLUSH_S = 2.0
_HOST_LOST = "the server was lost while it answered: send the request again"


def _own_config(config: ServeConfig, number: int) -> ServeConfig:
    """Return what of the server's configuration is a worker's: it has no repository and no routes, keeps no streams,
    has no settings that clients change, and its request log is its own."""
    ledger = config.ledger
    if ledger.request_log is not None:
        path = Path(ledger.request_log)
        ledger = replace(ledger, request_log=str(path.with_stem(f"{path.stem}-worker-{number}")))
    return replace(
        config,
        repository=RepositoryOptions(),
        routes=RouteOptions(),
        streams=StreamOptions(),
        logging=LoggingOptions(),
        trace=TraceOptions(),
        ledger=ledger,
    )


class Worker:
    """Serves the shared port: what it can by itself, and the rest through the host. Belongs to the event loop."""

    def __init__(self, link: Wire[ToWorker], number: int, config: ServeConfig, host_socket: str) -> None:
        """`link` is the one to the host, `number` this worker's own, `host_socket` takes forwarded requests."""
        self._link = link
        self._config = config
        self._number = number
        self._quotas = HostQuotas(link.send)
        own = _own_config(config, number)
        self._server = make_worker_server(own, self._quotas)
        self._models = LinkedModels(self._server, config, link.send)
        self._host = HostApplication(host_socket)
        self._app = Dispatch(make_application(self._server, own), self._host, self._models)

    async def run(self, listener: socket.socket) -> None:
        """Serve the port until the host wants an end, or is lost."""
        measure_process(self._server, self._config.metrics, f"worker-{self._number}")
        await self._server.accounts.calls.access.ring.start()
        await self._server.plane.repository.start()
        self._server.plane.health.begin_serving()
        http = HttpServer(self._app, listener)
        http.start()
        settle_objects()
        favour_event_loop()
        reporting = asyncio.create_task(self._report(), name="report")
        linking = asyncio.create_task(self._models.keep_linked(), name="link-models")
        try:
            drain = await self._follow()
            if drain is not None:
                drain = await self._drain(http, drain)
            if drain is None:
                log.error("the host process is gone; this worker ends")
                self._quotas.fail()
                await self._server.abort_all(SluiceError(ErrorCode.UNAVAILABLE, _HOST_LOST, retry_after_s=1.0))
        finally:
            for task in (reporting, linking):
                task.cancel()
            await http.stop(_FLUSH_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(_FLUSH_S):
                    await self._models.close()
                    await self._server.rooms.close()
            self._host.close()
            self._link.send(read_counts(self._server.metrics.registry, 0))
            self._link.close()

    async def _follow(self) -> Drain | None:
        """Do what the host says until it wants an end, None where it is lost."""
        while True:
            match await self._link.read():
                case Served(models):
                    self._models.want(models)
                case AskCounts(number):
                    self._link.send(read_counts(self._server.metrics.registry, number))
                case AskRequests(number, cancel):
                    num_cancelled = self._server.live.cancel_here(cancel) if cancel else 0
                    self._link.send(Requests(number, self._server.live.list_here(), num_cancelled))
                case AskTimelines(number, request_id, owner):
                    found = self._server.timelines.find_here(request_id, owner)
                    self._link.send(FoundTimelines(number, found))
                case Decision() as decision:
                    self._quotas.decide(decision)
                case Drain() as drain:
                    return drain
                case None:
                    return None

    async def _report(self) -> None:
        while True:
            self._link.send(read_counts(self._server.metrics.registry, 0))
            await asyncio.sleep(REPORT_S)

    async def _drain(self, http: HttpServer, drain: Drain) -> Drain | None:
        """Take no more connections, and end the open ones when their requests have ended: in time where the server
        ends, and else however long they take. Returns None where the host is lost meanwhile."""
        while True:
            if drain.refuses:
                self._server.plane.health.begin_drain()
            timeout_s = self._config.shutdown.exit_timeout_s if drain.refuses else inf
            draining = asyncio.create_task(http.drain(timeout_s), name="drain")
            following = asyncio.create_task(self._follow(), name="follow-host")
            try:
                await asyncio.wait((draining, following), return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (draining, following):
                    task.cancel()
            if draining.done():
                break
            changed = following.result()
            if changed is None:
                return None
            drain = changed
        if not draining.result():
            log.warning("%d requests are still open after %g s; ending them", self._server.plane.num_open, timeout_s)
            await self._server.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
            await http.drain(_FLUSH_S)
        return drain
