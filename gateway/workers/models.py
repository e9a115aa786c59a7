"""The language models that a worker shares with the host: it attaches to their engines, and leaves them."""

import asyncio
import logging
from collections.abc import Callable

from sluice.engine.fleet.membership.members import PushedMembership
from sluice.errors import SluiceError
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.server import Server
from sluice.gateway.workers.messages import Linked
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.sharing import AttachSettings, SharedModel, attach_model

log = logging.getLogger(__name__)

_RETRY_S = 5.0


class LinkedModels:
    """The names of the models that a worker serves now. Belongs to the event loop."""

    def __init__(self, server: Server, config: ServeConfig, send: Callable[[Linked], None]) -> None:
        """`send` tells the host which models are in use."""
        self._repository = server.plane.repository
        self._metrics = server.metrics
        self._config = config
        self._send = send
        self._wanted: dict[str, SharedModel] = {}
        self._memberships: dict[str, PushedMembership] = {}
        """Those of the models in use whose engines are elsewhere, by id."""
        self._has_changed = asyncio.Event()
        self._used: dict[str, LlmModel | None] = {}
        """The models in use by id, also those that end; None for one whose engine is being attached."""
        self._names: dict[str, str] = {}
        """Ids by name."""
        self._endings: set[asyncio.Task[None]] = set()

    def __contains__(self, name: object) -> bool:
        id_ = self._names.get(str(name))
        model = None if id_ is None else self._used[id_]
        return model is not None and not model.engine.is_asleep  # only the host waits for a first engine

    def want(self, models: list[SharedModel]) -> None:
        """Serve these models, and no others. Engines elsewhere of one that is served no more have left. One that has no
        engine any more is kept, with its streams; it is left to the host where it was not in use."""
        self._wanted = {each.id: each for each in models if each.sockets or each.members or each.id in self._used}
        for id_, membership in self._memberships.items():
            membership.push(self._wanted[id_].members if id_ in self._wanted else ())
        for each in models:
            if each.members and each.id not in self._memberships:
                self._memberships[each.id] = PushedMembership(each.members)
        self._used |= {each: None for each in self._wanted if each not in self._used}
        self._has_changed.set()

    async def keep_linked(self) -> None:
        """Attach to the engines of the wanted models, and leave all others, until cancelled."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            for name, id_ in list(self._names.items()):
                if id_ not in self._wanted:
                    self._leave(name, id_)
            for id_, shared in list(self._wanted.items()):
                if id_ in self._wanted and self._used.get(id_) is None:
                    await self._attach(shared)
            for id_ in [id_ for id_, model in self._used.items() if model is None and id_ not in self._wanted]:
                del self._used[id_]
                self._memberships.pop(id_, None)
            self._tell()

    def _tell(self) -> None:
        attached = [id_ for id_, model in self._used.items() if model is not None]
        self._send(Linked(attached, [id_ for id_ in self._used if id_ not in attached]))

    async def _attach(self, shared: SharedModel) -> None:
        metrics, limits, shutdown = self._metrics, self._config.request_limits(), self._config.shutdown
        settings = AttachSettings(shutdown.heartbeat_timeout_s, shutdown.exit_timeout_s, self._config.fleet.wake())
        membership = self._memberships.get(shared.id)
        try:
            model = await attach_model(shared, membership, metrics.open_request, settings, limits)
        except SluiceError as error:
            log.warning("model '%s' is left to the host for now: %s", shared.name, error.message)
            asyncio.get_running_loop().call_later(_RETRY_S, self._has_changed.set)
            return
        self._used[shared.id] = model
        self._repository.add(model)
        self._names[shared.name] = shared.id

    def _leave(self, name: str, id_: str) -> None:
        """Send requests for a model to the host from now on, and leave its engine after the last one that is open."""
        model = self._used[id_]
        assert model is not None
        del self._names[name]
        self._repository.remove(model)
        ending = asyncio.create_task(self._end(id_, model), name=f"leave {name}")
        self._endings.add(ending)
        ending.add_done_callback(self._endings.discard)

    async def _end(self, id_: str, model: LlmModel) -> None:
        await model.unload()
        del self._used[id_]
        self._memberships.pop(id_, None)
        self._tell()

    async def close(self) -> None:
        """Leave all engines. Open requests end in an error."""
        for model in list(self._used.values()):
            if model is not None:
                self._repository.remove(model)
                await model.close()
        if self._endings:
            await asyncio.wait(self._endings)
