"""The workers of a host: starts them, replaces those that are lost, and hands the port from one to the next."""

import asyncio
import logging
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp

from sluice.errors import SluiceError
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.serving import OFF
from sluice.gateway.plane.live_requests import LiveRequest
from sluice.gateway.server import Server
from sluice.gateway.workers.counts import Family, SummedRegistry, WorkerCounts, worker_families
from sluice.gateway.workers.models import CopiedModel, Wanted
from sluice.gateway.workers.private import PrivateServer
from sluice.gateway.workers.quotas import Decision, Reserve, Settle
from sluice.gateway.workers.slot import HOST, Slot, WorkerMaker, WorkerProcess
from sluice.log_relay import collecting_socket
from sluice.pipelines.llm.model import LlmModel, llm_text_of
from sluice.pipelines.llm.sharing import SharedModel, describe_shared
from sluice.pipelines.text.sessions import SessionRow
from sluice.record.timelines import Timeline, TimelineOwner
from sluice.serving.model import Model

log = logging.getLogger(__name__)

_LOOK_S = 0.2
"""How often the host looks which models there are."""
_ANSWER_S = 0.5
"""How long a worker may take to answer a question; of a late one the host has the counts of a second ago."""
_AGREE_S = 2.0
"""How long a change of the models waits for workers that do not answer."""


class AskedTimelines(msgspec.Struct, frozen=True):
    """Ask a worker for its timelines of a request id, or all for "", that `owner` may see; None sees all."""

    request_id: str
    owner: TimelineOwner | None


class FoundRequests(msgspec.Struct, frozen=True):
    """A worker's open generations, and how many were cancelled before."""

    open: list[LiveRequest]
    num_cancelled: int


class Farewell(msgspec.Struct, frozen=True):
    """The last words of a worker: what it has counted."""

    worker: int
    counts: list[Family]


class ModelOffer:
    """Looks at the host's models. Belongs to the event loop."""

    def __init__(self, server: Server, config: ServeConfig) -> None:
        self._repository = server.plane.repository
        self._routes = server.plane.routes
        self._v2 = server.v2
        self._library = server.library
        self._config = config
        self._seen: dict[str, tuple[list[Model], CopiedModel | None]] = {}
        """The versions of each name that were looked at last, and the copy that workers make of them, if any."""

    def look(self) -> tuple[Wanted, dict[str, LlmModel]]:
        """Return what workers may serve now, and the language models among it by id."""
        models: dict[str, list[Model]] = {}
        for each in self._repository.models():
            models.setdefault(each.name, []).append(each)
        shared: dict[str, tuple[SharedModel, LlmModel]] = {}
        for name, versions in models.items():
            if llm_text_of(versions[-1]) is not None and (found := self._share(name)) is not None:
                shared[name] = found
        copied = self._copy({name: versions for name, versions in models.items() if name not in shared}, shared)
        wanted = Wanted(
            shared=tuple(each for each, _ in shared.values()),
            copied=tuple(copied.values()),
            is_all=models.keys() == {*shared, *copied} and not self._routes,
            takes_v2=not self._v2.trace.is_on and not self._config.http.allows_client_shm,
            takes_rag=self._library is None or (self._library.is_shared and not self._library.is_encoding),
        )
        return wanted, {each.id: model for each, model in shared.values()}

    def _share(self, name: str) -> tuple[SharedModel, LlmModel] | None:
        """Return a language model that its name alone chooses, and whose engine takes other clients."""
        with suppress(SluiceError):
            model = self._repository.find(name)
            if isinstance(model, LlmModel) and not self._repository.has_weights(name):
                shared = describe_shared(model)
                return None if shared is None else (shared, model)
        return None

    def _copy(
        self, models: dict[str, list[Model]], shared: dict[str, tuple[SharedModel, LlmModel]]
    ) -> dict[str, CopiedModel]:
        """Return the models that workers may load too; of ensembles those whose members they have."""
        found = {}
        for name, versions in models.items():
            if self._seen.get(name, ([],))[0] != versions:
                self._seen[name] = versions, self._describe(name, versions)
            copied = self._seen[name][1]
            if copied is not None and not self._repository.has_weights(name):
                found[name] = copied
        self._seen = {name: each for name, each in self._seen.items() if name in models}
        while lost := [name for name, each in found.items() if not {*each.members} <= {*found, *shared}]:
            for name in lost:
                del found[name]
        ids = {name: each.id for name, (each, _) in shared.items()} | {name: each.id for name, each in found.items()}
        return {name: _with_members(each, ids) for name, each in found.items()}

    def _describe(self, name: str, versions: list[Model]) -> CopiedModel | None:
        """Return what a worker needs to load a model; None for one that there may be only once: it keeps something
        between requests, has a bound that is the whole server's, or a GPU's memory."""
        signature, config = self._repository.signature(name), versions[-1].config
        backend = self._repository.backend_of(config)
        queue = config.dynamic_batching.default_queue_policy
        if (
            not signature
            or backend is None
            or not backend.is_stateless
            or self._config.instances.rate_limit != OFF
            or config.HasField("sequence_batching")
            or queue.max_queue_size
            or config.dynamic_batching.priority_queue_policy
            or (backend.uses_gpus and any(each.kind != each.KIND_CPU for each in config.instance_group))
        ):
            return None
        members = tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))
        id_ = f"{name} {' '.join(f'{id(each):x}' for each in versions)}"
        return CopiedModel(id_, name, signature, members, backend.finds_models)


def _with_members(copied: CopiedModel, ids: Mapping[str, str]) -> CopiedModel:
    """Return an ensemble with an id that changes with its members; any other model as it is."""
    if not copied.members:
        return copied
    return msgspec.structs.replace(copied, id=" + ".join((copied.id, *(ids[each] for each in copied.members))))


class WorkerPool(Collector):
    """The workers of one server, one for each socket of the shared port. Belongs to the event loop.

    A socket without a worker, at the start and after a crash, is served by the host itself.
    """

    def __init__(self, config: ServeConfig, listeners: Iterable[socket.socket], folder: Path) -> None:
        """`folder` takes the sockets."""
        self._config = config
        self._listeners = listeners
        self._folder = folder
        self._counts = WorkerCounts()
        self._private: PrivateServer | None = None
        self._slots: list[Slot] = []
        self._offer: ModelOffer | None = None
        self._wanted = Wanted()
        self._tasks: list[asyncio.Task[None]] = []
        self._restarting: asyncio.Task[None] | None = None

    async def start(self, app: ASGIApp, server: Server) -> None:
        """Take requests from now on, and start the workers of the host `server`, whose application is `app`."""
        quotas = server.accounts.quotas
        assert quotas is not None
        maker = WorkerMaker(self._config, self._folder, collecting_socket(), self._counts, quotas)
        self._slots = [Slot(number, each, app, maker) for number, each in enumerate(self._listeners, 1)]
        self._offer = ModelOffer(server, self._config)
        server.rooms.join(self, notice=self._problem)
        routes = {"reserve": self._reserve, "settle": self._settle, "farewell": self._part}
        self._private = PrivateServer(self._folder / HOST, routes, app)
        self._private.start()
        for each in self._slots:
            each.start()
        self._tasks = [asyncio.create_task(self._follow_models(), name="shared-models")]

    async def wait_ready(self, timeout_s: float) -> bool:
        """Wait until each worker serves the models that there are. Returns whether all do within `timeout_s`."""
        self._publish()
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

    # --- models ---

    async def _follow_models(self) -> None:
        while True:
            self._publish()
            await asyncio.sleep(_LOOK_S)

    def _publish(self) -> None:
        if self._offer is None:
            return  # gRPC listens before the workers start
        wanted, models = self._offer.look()
        if wanted != self._wanted:
            self._wanted = wanted
            for each in self._slots:
                each.serve(wanted, models)

    async def settle(self) -> None:
        """Wait until no worker serves other models than the host."""
        self._publish()
        with suppress(TimeoutError):
            async with asyncio.timeout(_AGREE_S):
                await asyncio.gather(*(worker.wait_agreed() for _, worker in self._workers()))

    # --- what workers ask ---

    def _find(self, id_: int) -> WorkerProcess:
        """Return a worker that lives. Raises LookupError."""
        for _, worker in self._workers():
            if worker.id == id_:
                return worker
        raise LookupError(f"there is no HTTP worker {id_}")

    async def _reserve(self, body: bytes) -> Decision:
        asked = msgspec.msgpack.decode(body, type=Reserve)
        return await self._find(asked.worker).desk.reserve(asked)

    async def _settle(self, body: bytes) -> bool:
        asked = msgspec.msgpack.decode(body, type=Settle)
        self._find(asked.worker).desk.settle(asked)
        return True

    async def _part(self, body: bytes) -> bool:
        farewell = msgspec.msgpack.decode(body, type=Farewell)
        self._find(farewell.worker).keep_last_counts(farewell.counts)
        return True

    # --- metrics ---

    def families(self) -> list[Metric]:
        """Return what the workers have counted until a moment ago."""
        return self._counts.families()

    async def gather(self, own: CollectorRegistry) -> CollectorRegistry:
        """Return the registry of the whole server, as it is now; `own` is the host's."""
        await asyncio.gather(*(worker.ask_counts(_ANSWER_S) for _, worker in self._workers()))
        return SummedRegistry(own, self._counts)

    def collect(self) -> Iterable[Metric]:
        return worker_families(sum(s.is_serving for s in self._slots), sum(s.num_losses for s in self._slots))

    def _problem(self) -> str:
        missing = [each.number for each in self._slots if not each.is_serving]
        return f"HTTP worker {', '.join(map(str, missing))} is not there; the host answers for it" if missing else ""

    async def statistics(self) -> list[dict[str, Any]]:
        """Return the statistics of the workers' models, as the v2 protocol has them."""
        answers = await self._ask("statistics", None, list[dict[str, Any]])
        return [each for _, answer in answers for each in answer]

    # --- open generations ---

    async def list_requests(self) -> list[LiveRequest]:
        """Return the open generations of the workers, those of one that does not answer in time left out."""
        return (await self._ask_requests(""))[0]

    async def cancel_requests(self, id_: str) -> int:
        """End the generations of that id in the workers. Returns how many there were."""
        return (await self._ask_requests(id_))[1]

    async def _ask_requests(self, cancel: str) -> tuple[list[LiveRequest], int]:
        answers = await self._ask("requests", cancel, FoundRequests)
        found = [msgspec.structs.replace(each, worker=number) for number, answer in answers for each in answer.open]
        return found, sum(answer.num_cancelled for _, answer in answers)

    async def list_sessions(self) -> list[SessionRow]:
        """Return the sessions that sent the workers a request last."""
        answers = await self._ask("sessions", None, list[SessionRow])
        return [each for _, answer in answers for each in answer]

    async def find_timelines(self, request_id: str, owner: TimelineOwner | None) -> list[Timeline]:
        """Return the timelines that the workers have, those of one that does not answer in time left out."""
        answers = await self._ask("timelines", AskedTimelines(request_id, owner), list[Timeline])
        return [each for _, answer in answers for each in answer]

    def _workers(self) -> list[tuple[int, WorkerProcess]]:
        return [(slot.number, worker) for slot in self._slots for worker in slot.workers()]

    async def _ask(self, route: str, question: object, answer: type[Any]) -> list[tuple[int, Any]]:
        """Return the answers of the workers that answer in time, each with the number of its slot."""
        asking = [(number, worker.ask(route, question, answer, _ANSWER_S)) for number, worker in self._workers()]
        answers = await asyncio.gather(*(each for _, each in asking))
        return [(number, each) for (number, _), each in zip(asking, answers, strict=True) if each is not None]

    # --- shutdown ---

    def begin_stop(self) -> None:
        """Take no more connections; the workers end with their open requests, and refuse others."""
        for task in (*self._tasks, *(() if self._restarting is None else (self._restarting,))):
            task.cancel()
        for each in self._slots:
            each.begin_stop()
        if self._private is not None:
            self._private.end_sockets()

    async def stop(self, timeout_s: float) -> None:
        """Give workers `timeout_s` to end, then end them."""
        self.begin_stop()
        await asyncio.gather(*(each.stop(timeout_s) for each in self._slots))
        if self._private is not None:
            await self._private.stop(timeout_s)

    def kill(self) -> None:
        """End all workers now."""
        for _, worker in self._workers():
            worker.kill()
