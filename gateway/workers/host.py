"""The workers of a host: starts them, replaces those that are lost, and hands the port from one to the next."""

import asyncio
import logging
import pickle
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from sluice.engine.fleet.membership.members import Member
from sluice.errors import SluiceError
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.live_requests import LiveRequest
from sluice.gateway.server import Server
from sluice.gateway.workers.answering import ForwardedServer
from sluice.gateway.workers.counts import SummedRegistry, WorkerCounts, worker_families
from sluice.gateway.workers.messages import Welcome
from sluice.gateway.workers.slot import Slot, WorkerMaker
from sluice.log_relay import collecting_socket
from sluice.pipelines.llm.model import LlmModel, llm_text_of
from sluice.pipelines.llm.sharing import SharedModel, describe_shared
from sluice.record.timelines import Timeline, TimelineOwner
from sluice.serving.repository.repository import ModelRepository

log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often the host looks which models there are."""
_COUNTS_S = 0.5
"""How long a scrape waits for the workers' counts; of a late one it has those of a second ago."""
SharedModels = dict[str, tuple[SharedModel, LlmModel]]


def _described(models: SharedModels) -> dict[str, tuple[Member, ...]]:
    """Return what workers are told of again where it changes: the models, and their engines elsewhere."""
    return {id_: shared.members for id_, (shared, _) in models.items()}


def _find_shared(repository: ModelRepository) -> SharedModels:
    """Return the language models that workers may serve, by id: those that a name alone chooses."""
    found = {}
    for name in {each.name for each in repository.models() if llm_text_of(each) is not None}:
        with suppress(SluiceError):
            model = repository.find(name)
            if isinstance(model, LlmModel) and not repository.has_weights(name):
                shared = describe_shared(model)
                if shared is not None:
                    found[shared.id] = shared, model
    return found


class WorkerPool(Collector):
    """The workers of one server, one for each socket of the shared port. Belongs to the event loop.

    A socket without a worker, at the start and after a crash, is served by the host itself.
    """

    def __init__(
        self,
        config: ServeConfig,
        listeners: Iterable[socket.socket],
        folder: Path,
    ) -> None:
        """`folder` takes the sockets."""
        self._config = config
        self._listeners = listeners
        self._socket = folder / "requests"
        self._counts = WorkerCounts()
        self._requests: ForwardedServer | None = None
        self._slots: list[Slot] = []
        self._shared: SharedModels = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp, server: Server) -> None:
        """Take requests from now on, and start the workers of the host `server`, whose application is `app`."""
        quotas = server.accounts.quotas
        assert quotas is not None
        welcome = Welcome(0, pickle.dumps(self._config), str(self._socket), collecting_socket())
        maker = WorkerMaker(welcome, self._counts, quotas, self._config.shutdown.heartbeat_timeout_s)
        self._slots = [Slot(number, each, app, maker) for number, each in enumerate(self._listeners, 1)]
        server.rooms.join(self, notice=self._problem)
        self._requests = ForwardedServer(app, self._socket)
        await self._requests.start()
        for each in self._slots:
            each.start()
        following = self._follow_models(server.plane.repository)
        self._tasks = [asyncio.create_task(following, name="shared-models")]

    async def wait_ready(self, repository: ModelRepository, timeout_s: float) -> bool:
        """Wait until each worker serves the models that there are. Returns whether all do within `timeout_s`."""
        self._publish_models(repository)
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(each.wait_serving() for each in self._slots))
                return True
        return False

    def restart(self) -> None:
        """Replace the workers one after the other: a new one serves before the old one takes no more connections."""
        if self._restarting is None or self._restarting.done():
            self._restarting = asyncio.create_task(self._restart(), name="rolling-restart")

    async def _restart(self) -> None:
        for each in self._slots:
            if not await each.replace():
                log.error("HTTP worker %d could not be replaced; the old one and those after it go on", each.number)
                return
        log.info("all %d HTTP workers are replaced", len(self._slots))

    async def _follow_models(self, repository: ModelRepository) -> None:
        while True:
            self._publish_models(repository)
            await asyncio.sleep(_LOOK_S)

    def _publish_models(self, repository: ModelRepository) -> None:
        shared = _find_shared(repository)
        if _described(shared) != _described(self._shared):
            self._shared = shared
            for each in self._slots:
                each.serve(shared)

    # --- metrics ---

    def families(self) -> list[Metric]:
        """Return what the workers have counted until a moment ago."""
        return self._counts.families()

    async def gather(self, own: CollectorRegistry) -> CollectorRegistry:
        """Return the registry of the whole server, as it is now; `own` is the host's."""
        await asyncio.gather(*(worker.ask_counts(_COUNTS_S) for each in self._slots for worker in each.workers()))
        return SummedRegistry(own, self._counts)

    def collect(self) -> Iterable[Metric]:
        return worker_families(sum(s.is_serving for s in self._slots), sum(s.num_losses for s in self._slots))

    def _problem(self) -> str:
        missing = [each.number for each in self._slots if not each.is_serving]
        return f"HTTP worker {', '.join(map(str, missing))} is not there; the host answers for it" if missing else ""

    # --- open generations ---

    async def list_requests(self) -> list[LiveRequest]:
        """Return the open generations of the workers, those of one that does not answer in time left out."""
        return (await self._ask_requests())[0]

    async def cancel_requests(self, id_: str) -> int:
        """End the generations of that id in the workers. Returns how many there were."""
        return (await self._ask_requests(id_))[1]

    async def _ask_requests(self, cancel: str = "") -> tuple[list[LiveRequest], int]:
        found: list[LiveRequest] = []
        num_cancelled = 0
        workers = [(slot.number, worker) for slot in self._slots for worker in slot.workers()]
        answers = await asyncio.gather(*(worker.ask_requests(_COUNTS_S, cancel) for _, worker in workers))
        for (number, _), answer in zip(workers, answers, strict=True):
            if answer is not None:
                found += [msgspec.structs.replace(each, worker=number) for each in answer.open]
                num_cancelled += answer.num_cancelled
        return found, num_cancelled

    async def find_timelines(self, request_id: str, owner: TimelineOwner | None) -> list[Timeline]:
        """Return the timelines that the workers have, those of one that does not answer in time left out."""
        workers = [worker for slot in self._slots for worker in slot.workers()]
        answers = await asyncio.gather(*(each.ask_timelines(_COUNTS_S, request_id, owner) for each in workers))
        return [each for answer in answers for each in answer]

    # --- shutdown ---

    def begin_stop(self) -> None:
        """Take no more connections; the workers end with their open requests, and refuse others."""
        for task in (*self._tasks, *(() if self._restarting is None else (self._restarting,))):
            task.cancel()
        for each in self._slots:
            each.begin_stop()

    async def stop(self, timeout_s: float) -> None:
        """Give workers `timeout_s` to end, then end them."""
        self.begin_stop()
        await asyncio.gather(*(each.stop(timeout_s) for each in self._slots))
        if self._requests is not None:
            await self._requests.stop(timeout_s)

    def kill(self) -> None:
        """End all workers now."""
        for each in self._slots:
            for worker in each.workers():
                worker.kill()
