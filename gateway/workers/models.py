"""The models that a worker serves by itself: language models over the host's engines, and copies of stateless ones."""

import asyncio
import logging
from collections.abc import Iterable

import msgspec

from sluice.engine.fleet.membership.members import PushedMembership
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.server import Server
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.sharing import AttachSettings, SharedModel, attach_model

log = logging.getLogger(__name__)

_RETRY_S = 5.0


class CopiedModel(msgspec.Struct, frozen=True):
    """A model that a worker loads as the host has loaded it. Equal ids mean the same loaded versions."""

    id: str
    name: str
    signature: str
    """The digest of its files in the repository (`ModelRepository.signature`)."""
    members: tuple[str, ...] = ()
    """Names of the models that an ensemble calls."""
    finds_models: bool = False
    """Whether it finds others by itself: then it needs all of them here."""


class Wanted(msgspec.Struct, frozen=True):
    """The host's question to a worker: serve these models from now on, and leave the rest to the host."""

    shared: tuple[SharedModel, ...] = ()
    copied: tuple[CopiedModel, ...] = ()
    is_all: bool = False
    """Whether the host has no other models, and no routes."""
    takes_v2: bool = False
    """Whether requests of the v2 protocol need nothing that the host alone has."""
    takes_rag: bool = False
    """The same for questions to documents."""
    ends: bool = False
    """Take no more connections, and end when the open ones have."""
    refuses: bool = False
    """Refuse new requests at once, as the whole server ends."""

    @property
    def ids(self) -> frozenset[str]:
        """The models by id."""
        return frozenset([*(each.id for each in self.shared), *(each.id for each in self.copied)])


class Linked(msgspec.Struct, frozen=True):
    """The answer: the models by id that the worker uses, or cannot load, and those that it attaches or loads now. It
    uses no others any more."""

    ids: tuple[str, ...]
    coming: tuple[str, ...]


class WorkerModels:
    """The models that a worker serves now. Belongs to the event loop."""

    def __init__(self, server: Server, config: ServeConfig) -> None:
        self._repository = server.plane.repository
        self._metrics = server.metrics
        self._config = config
        self.wanted = Wanted()
        self._memberships: dict[str, PushedMembership] = {}
        """Those of the models in use whose engines are elsewhere, by id."""
        self._has_changed = asyncio.Event()
        self._used: dict[str, LlmModel | None] = {}
        """The language models in use by id, also those that end; None for one whose engine is being attached."""
        self._names: dict[str, str] = {}
        """Their ids by name."""
        self._copies: dict[str, CopiedModel] = {}
        """Copies that serve, by name."""
        self._present: dict[str, str] = {}
        """Ids of all copies that are loaded, by name: also those that serve no more."""
        self._failed: set[str] = set()
        """Ids of copies that could not be loaded."""
        self._is_whole = False
        self._endings: set[asyncio.Task[None]] = set()

    def serves(self, name: str, version: str = "") -> bool:
        """Return whether the worker answers for a model; `version` "" is that of requests without one."""
        id_ = self._names.get(name)
        if id_ is not None:
            model = self._used[id_]
            # Only the host waits for a first engine.
            return model is not None and not model.engine.is_asleep and version in ("", str(model.version))
        copy = self._copies.get(name)
        if copy is None or (copy.finds_models and not (self.is_whole and self.wanted.takes_rag)):
            return False
        return all(map(self.serves, copy.members))

    @property
    def is_whole(self) -> bool:
        """Whether all models of the server serve here."""
        return self._is_whole and all(map(self.serves, self._names))

    def want(self, wanted: Wanted) -> Linked:
        """Serve these models, and no others any more. Engines elsewhere of one that is served no more have left. One
        that has no engine any more is kept, with its streams; it is left to the host where it was not in use."""
        self.wanted = wanted
        kept = self._wanted_llms()
        for id_, membership in self._memberships.items():
            membership.push(kept[id_].members if id_ in kept else ())
        for each in wanted.shared:
            if each.members and each.id not in self._memberships:
                self._memberships[each.id] = PushedMembership(each.members)
        self._used |= {each: None for each in kept if each not in self._used}
        copies = {each.name: each for each in wanted.copied}
        self._copies = {name: each for name, each in self._copies.items() if copies.get(name) == each}
        for name, id_ in list(self._names.items()):
            if id_ not in kept:
                self._leave(name, id_)
        self._note_whole()
        self._has_changed.set()
        return self._linked()

    def _wanted_llms(self) -> dict[str, SharedModel]:
        return {each.id: each for each in self.wanted.shared if each.sockets or each.members or each.id in self._used}

    def _linked(self) -> Linked:
        attached = [id_ for id_, model in self._used.items() if model is not None]
        copied = [each.id for each in self._copies.values()]
        coming = [id_ for id_ in self._used if id_ not in attached]
        return Linked((*attached, *copied, *self._failed), tuple(coming))

    def _note_whole(self) -> None:
        names = {*self._names, *self._copies}
        wanted = {*(each.name for each in self.wanted.shared), *(each.name for each in self.wanted.copied)}
        self._is_whole = self.wanted.is_all and wanted <= names

    async def keep(self) -> None:
        """Attach to the engines of the wanted models, and load the wanted copies, until cancelled."""
        while True:
            await self._has_changed.wait()
            self._has_changed.clear()
            for id_, shared in self._wanted_llms().items():
                if id_ in self._wanted_llms() and self._used.get(id_) is None:
                    await self._attach(shared)
            wanted = self._wanted_llms()
            for id_ in [id_ for id_, model in self._used.items() if model is None and id_ not in wanted]:
                del self._used[id_]
                self._memberships.pop(id_, None)
            await self._copy()
            self._note_whole()

    # --- language models ---

    async def _attach(self, shared: SharedModel) -> None:
        metrics, limits, shutdown = self._metrics, self._config.request_limits(), self._config.shutdown
        settings = AttachSettings(shutdown.heartbeat_timeout_s, shutdown.exit_timeout_s, self._config.fleet.wake())
        membership = self._memberships.get(shared.id)
        try:
            model = await attach_model(shared, membership, metrics.open_request, settings, limits)
        except SluiceError as error:
            log.warning("model '%s' is left to the host for now: %s", shared.name, error.message)
            self._try_later()
            return
        self._used[shared.id] = model
        if shared.id not in self._wanted_llms():
            await self._end(shared.id, model)
            return
        self._repository.add(model)
        self._names[shared.name] = shared.id

    def _try_later(self) -> None:
        asyncio.get_running_loop().call_later(_RETRY_S, self._has_changed.set)

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

    # --- copies ---

    async def _copy(self) -> None:
        """Load the wanted copies, ensembles after their members, and unload all others."""
        wanted = {each.name: each for each in self.wanted.copied}
        self._failed &= {each.id for each in wanted.values()}
        for name, id_ in list(self._present.items()):
            if name not in wanted or wanted[name].id != id_:
                del self._present[name]
                await self._repository.unload(name)
        missing = [each for name, each in wanted.items() if name not in self._present and each.id not in self._failed]
        await asyncio.gather(*(self._load(each) for each in missing if not each.members))
        for each in _members_first([each for each in missing if each.members]):
            if all(name in self._names or name in self._present for name in each.members):
                await self._load(each)
            elif any(name in wanted and wanted[name].id in self._failed for name in each.members):
                self._failed.add(each.id)

    async def _load(self, copied: CopiedModel) -> None:
        name = copied.name
        try:
            await self._repository.load(name)
            if self._repository.signature(name) != copied.signature:
                await self._repository.unload(name)
                raise SluiceError(ErrorCode.UNAVAILABLE, "its folder has changed since the host has loaded it")
        except SluiceError as error:
            log.warning("model '%s' is left to the host: %s", name, error.message)
            self._failed.add(copied.id)
            return
        self._present[name] = copied.id
        if copied in self.wanted.copied:
            self._copies[name] = copied
        else:
            self._has_changed.set()

    async def close(self) -> None:
        """Leave all engines. Open requests end in an error."""
        for model in list(self._used.values()):
            if model is not None:
                self._repository.remove(model)
                await model.close()
        if self._endings:
            await asyncio.wait(self._endings)


def _members_first(ensembles: Iterable[CopiedModel]) -> list[CopiedModel]:
    """Return ensembles, each after those that it calls, which never call each other in a circle."""
    left, ordered = {each.name: each for each in ensembles}, list[CopiedModel]()
    while left:
        ready = [each for each in left.values() if not left.keys() & {*each.members}]
        ordered += ready or left.values()
        left = {name: each for name, each in left.items() if each not in ordered}
    return ordered
