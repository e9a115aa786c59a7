"""How many requests of batches run at a time: as many as the other requests leave room for, and none that they wait
for."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import NamedTuple

from sluice.errors import SluiceError
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import AdapterText

POLL_S = 0.02
"""Time between looks at the engines while a batch is under way."""
_SPARE_SHARE = 8
"""One in so many sequences of an engine is left free, so that a request that comes finds a place at once."""
_BESIDE_SHARE = 4
"""While other requests run, those of batches are at most one in so many sequences: each makes every step longer."""
_QUIET_S = 5.0
"""How long that goes on after the last of them."""
_MAX_RESERVED = 0.8
"""Share of the KV blocks that are reserved from which no more requests of batches start."""
_FRAMES_PER_YIELD = 2
"""Steps of the engine after which it shows what giving way has brought."""


class Capacity(NamedTuple):
    """The requests of batches that a model takes: `limit` of them alone, `limit_beside` others. `num_waiting` others
    wait, as of the engine's step `step`."""

    limit: int
    limit_beside: int
    has_others: bool = False
    num_waiting: int = 0
    step: int = 0


_OF_OTHERS = Capacity(4, 4)
"""The capacity of a model that has no engine of its own: an encoder, a pipeline, a model elsewhere."""
Measure = Callable[[str, int], Capacity]
"""Measures the capacity of a model by name, which has so many requests of batches in flight."""


class Place:
    """The right of one request to run. Its holder releases it, and sets `on_revoke`."""

    def __init__(self, owner: "_ModelPlaces") -> None:
        self._owner = owner
        self.on_revoke: Callable[[], object] = lambda: None
        self.is_revoked = False

    def release(self) -> None:
        """Give the place back. Idempotent."""
        self._owner.release(self)

    def revoke(self) -> None:
        """Take the place away: another request waits for it."""
        self.is_revoked = True
        self._owner.num_revoked += 1
        self.release()
        self.on_revoke()


@dataclass(slots=True, eq=False)
class _ModelPlaces:
    """The places of one model. The first that waits is the first to get one."""

    has_changed: asyncio.Event
    taken: list[Place] = field(default_factory=list)
    waiting: deque[asyncio.Future[Place]] = field(default_factory=deque)
    num_revoked: int = 0
    revoked_at: int = -_FRAMES_PER_YIELD
    others_at: float = -_QUIET_S
    """When other requests were seen last."""

    def release(self, place: Place) -> None:
        with suppress(ValueError):
            self.taken.remove(place)
            self.has_changed.set()

    def grant(self) -> bool:
        """Give a place to the first that waits. Returns whether there was one."""
        while self.waiting:
            future = self.waiting.popleft()
            if not future.done():
                self.taken.append(Place(self))
                future.set_result(self.taken[-1])
                return True
        return False

    def limit_now(self, capacity: Capacity, now: float) -> int:
        """Return how many places there are. They stay few for a while when the others are gone: more may come."""
        if capacity.has_others:
            self.others_at = now
        if capacity.num_waiting:
            return 0
        return capacity.limit_beside if now - self.others_at < _QUIET_S else capacity.limit

    def yield_to(self, capacity: Capacity) -> None:
        """Revoke the youngest places, as many as requests wait for."""
        if capacity.num_waiting and capacity.step >= self.revoked_at + _FRAMES_PER_YIELD:
            self.revoked_at = capacity.step
            for place in self.taken[-capacity.num_waiting :]:
                place.revoke()


class PlaceKeeper:
    """Hands places to the requests of all batches, and takes the youngest away where other requests wait.

    One place is granted in each turn of the event loop: to start a request takes a millisecond, which nobody's stream
    should wait for many times.
    """

    def __init__(self, measure: Measure) -> None:
        self._measure = measure
        self._models: dict[str, _ModelPlaces] = {}
        self._watch: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()
        self._num_revoked = 0

    @property
    def num_taken(self) -> int:
        return sum(len(each.taken) for each in self._models.values())

    @property
    def num_revoked(self) -> int:
        """How often a request gave its place to one that waited."""
        return self._num_revoked + sum(each.num_revoked for each in self._models.values())

    async def take(self, model: str) -> Place:
        """Wait for a place to ask `model`."""
        places = self._models.get(model)
        if places is None:
            places = self._models[model] = _ModelPlaces(self._has_changed)
        future: asyncio.Future[Place] = asyncio.get_running_loop().create_future()
        places.waiting.append(future)
        self._has_changed.set()
        if self._watch is None:
            self._watch = asyncio.create_task(self._watch_engines(), name="batch-places")
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                future.result().release()
            raise

    async def _watch_engines(self) -> None:
        """Grant and revoke until nobody holds a place or waits for one."""
        try:
            while self._models:
                if self._look():
                    await asyncio.sleep(0)
                    continue
                self._has_changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await self._has_changed.wait()
        except Exception as error:
            waiting = [future for places in self._models.values() for future in places.waiting]
            self._models.clear()
            for future in waiting:
                if not future.done():
                    future.set_exception(error)
        finally:
            self._watch = None

    def _look(self) -> bool:
        """Look at every model once. Returns whether a place was granted."""
        has_granted = False
        for model, places in list(self._models.items()):
            capacity = self._measure(model, len(places.taken))
            places.yield_to(capacity)
            if len(places.taken) < places.limit_now(capacity, monotonic()):
                has_granted |= places.grant()
            if not places.taken and not places.waiting:
                self._num_revoked += places.num_revoked
                del self._models[model]
        return has_granted


def measure_capacity(plane: Plane, model: str, num_lines: int, *, is_alone: bool = False) -> Capacity:
    """Measure by the engine's last report. With `is_alone` there are no others, and requests may queue."""
    try:
        text = plane.llm(model)
        text = text.base if isinstance(text, AdapterText) else text
        if not isinstance(text, LlmText):
            return _OF_OTHERS
        engine, info = text.engine, text.info
    except SluiceError:
        return _OF_OTHERS
    if is_alone:
        limit = info.max_num_seqs + min(info.max_num_seqs, engine.config.max_queued_requests // 2)
        return Capacity(limit, limit)
    stats = engine.stats
    num_others = max(0, stats.num_running + stats.num_waiting - num_lines)
    limit = info.max_num_seqs - max(1, info.max_num_seqs // _SPARE_SHARE) - num_others
    if stats.num_blocks_reserved > _MAX_RESERVED * info.capacity_blocks:
        limit = min(limit, num_lines)
    if not num_others:
        limit = max(limit, 1)
    beside = min(limit, max(1, info.max_num_seqs // _BESIDE_SHARE))
    return Capacity(limit, beside, num_others > 0, stats.num_foreground_waiting, stats.steps_total)
