"""The client of several engines of one model, which the rooms above use as one engine.

A request goes to one replica, and its stream belongs to that replica's client: nothing here happens for each token.
The engine alone admits; one that cannot do so soon enough says so, and the request is offered to the next. Where a
replica is lost, its streams move to others at once (`StreamMover`)."""

import asyncio
import itertools
import logging
from collections import ChainMap
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from math import inf
from time import perf_counter

import msgspec

from sluice.engine.client.base import EngineClient, Replica
from sluice.engine.client.stream import GenerationStream
from sluice.engine.client.supervision import Clock, RecoveryCounts
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.choosing import ReplicaChooser
from sluice.engine.fleet.handover import PromptHandover
from sluice.engine.fleet.membership.members import Member
from sluice.engine.fleet.moving import StreamHolder, StreamMover
from sluice.engine.fleet.router import DEFAULT_ROUTING, MIN_SPLIT_TOKENS, RouterSettings
from sluice.engine.fleet.waking import WakingRoom
from sluice.engine.frames import SleepMode
from sluice.engine.statistics import NO_STATS, EngineStats, sum_stats
from sluice.engine.types import EngineInfo, GenerateRequest
from sluice.engine.validation import check_adapter, check_lengths
from sluice.errors import ErrorCode, SluiceError, invalid

log = logging.getLogger(__name__)

RETRY_S = 1.0
NO_ENGINE = "no engine of this model can be reached"
_AGREED = ("model_type", "vocab_size", "block_size", "max_model_len", "eos_token_ids", "embedding_size")
"""Fields of EngineInfo that must be the same in all replicas, so that a stream may go on in any of them."""


class FleetClient:
    """Serves with several engines. It has the members of `EngineClient` that the rooms above use (`Engine`). All
    methods run on one event loop."""

    def __init__(
        self,
        config: EngineConfig,
        replicas: Iterable[Replica] = (),
        routing: RouterSettings = DEFAULT_ROUTING,
        *,
        room: WakingRoom | None = None,
        min_split_tokens: int = MIN_SPLIT_TOKENS,
        clock: Clock = perf_counter,
    ) -> None:
        """Take the clients of engines, which have not started. `config` is what the server was told, before it was
        split between them. `routing` says how replicas are chosen. Requests are held in the `room` while there is no
        engine. Prefill replicas compute prompts of which another replica would have `min_split_tokens` to compute."""
        self.config = config
        self.routing = routing
        self.replicas: list[Replica] = []
        self._chooser = ReplicaChooser(self.replicas, routing)
        self.handover = PromptHandover(self._chooser, min_split_tokens)
        self._room = room
        self._holder = StreamHolder(config, room, clock)
        self._mover = StreamMover(self._chooser, self._holder)
        self._numbers = itertools.count()
        self._changing = asyncio.Lock()
        """Held while LoRA adapters change."""
        self._summed: tuple[list[EngineStats], EngineStats] = ([], NO_STATS)
        self._merged: tuple[list[EngineInfo], EngineInfo | None] = ([], None)
        self._past_stats, self._past_recoveries = NO_STATS, RecoveryCounts()
        """The sums over the replicas that have left, because counters must not decrease."""
        self._failure: str | None = None
        for each in replicas:
            self._append(each)

    # -- facts

    @property
    def members(self) -> tuple[Member, ...] | None:
        """The engines elsewhere that are named now; None for a fleet of engines here."""
        return None

    def _alive(self) -> list[Replica]:
        return [each for each in self.replicas if each.engine.failure is None]

    def _staying(self) -> list[Replica]:
        return [each for each in self._alive() if not each.is_leaving]

    @property
    def info(self) -> EngineInfo:
        """The limits of the smallest replica, on which requests may rely, and the capacity and the LoRA
        adapters of all together; of the last ones while there are none. Raises UNAVAILABLE before `start` has
        returned."""
        parts = [each.engine.info for each in self._alive() or self.replicas]
        known, merged = self._merged
        if not parts:
            if merged is None:
                raise SluiceError(ErrorCode.UNAVAILABLE, NO_ENGINE)
            return merged
        if merged is None or len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            merged = _merge_infos(parts)
            self._merged = parts, merged
        return merged

    @property
    def stats(self) -> EngineStats:
        """The sums over all replicas. The predicted wait is the least, because a request goes there."""
        parts = [self._past_stats, *(each.engine.stats for each in self.replicas)]
        known, summed = self._summed
        if len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            waits = [each.engine.stats.predicted_wait_s for each in self.replicas if each.engine.is_serving]
            summed = sum_stats(parts, min(waits, default=0.0))
            self._summed = parts, summed
        if not self.num_held:
            return summed
        wait_s = summed.predicted_wait_s if self._room is None else self._room.expected_s()
        return msgspec.structs.replace(
            summed,
            num_waiting=summed.num_waiting + self.num_held,
            predicted_wait_s=max(summed.predicted_wait_s, wait_s),
        )

    @property
    def failure(self) -> str | None:
        """Why there is no engine any more; None while one lives or is being restarted."""
        if self._failure is not None:
            return self._failure
        reasons = [each.engine.failure for each in self.replicas]
        return next(iter(reasons), "there is no replica") if all(reason is not None for reason in reasons) else None

    @property
    def can_restart(self) -> bool:
        return any(each.engine.can_restart for each in self.replicas)

    @property
    def is_restarting(self) -> bool:
        """Whether no replica serves now, and one is about to."""
        is_served = any(each.engine.is_serving for each in self.replicas)
        return self.failure is None and not is_served and not self.is_asleep

    @property
    def is_asleep(self) -> bool:
        """Whether there is no engine that stays, and requests are held until one joins."""
        if self._room is None or self._failure is not None:
            return False
        return not self._staying()

    @property
    def num_held(self) -> int:
        """Requests that wait for the first engine, and streams that wait for the next."""
        return len(self._holder.open_streams) if self._room is None else self._room.num_held

    @property
    def waking_s(self) -> float:
        """Seconds for which requests have waited for the first engine; 0 where none wait."""
        return 0.0 if self._room is None else self._room.waking_s

    async def wait_awake(self) -> None:
        """Wait while it `is_asleep`. Raises OVERLOADED where too many wait, UNAVAILABLE where none comes in time."""
        while self._room is not None and self.is_asleep:
            await self._room.wait()

    @property
    def recoveries(self) -> RecoveryCounts:
        return sum((each.engine.recoveries for each in self.replicas), self._past_recoveries)

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(pid for each in self.replicas for pid in each.engine.pids)

    def heartbeat_age_s(self) -> float:
        """Return the seconds since the replica was heard that was heard last; 0 while there need not be any."""
        if self.is_asleep:
            return 0.0
        serving = [each for each in self.replicas if each.engine.is_serving]
        return min((each.engine.heartbeat_age_s() for each in serving or self.replicas), default=inf)

    # -- life

    async def start(self) -> None:
        """Load the model in all engines, at the same time. Raises the error of the first that cannot load it, or
        INVALID where they do not agree; all engines have ended then."""
        tasks = [asyncio.create_task(each.engine.start(), name=f"replica-start {each.name}") for each in self.replicas]
        try:
            await asyncio.gather(*tasks)
            for each in self.replicas[1:]:
                check_agreement(self.replicas[0], each)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            await self.stop()
            raise
        self.watch()

    def watch(self) -> None:
        """Move streams between the replicas from now on."""
        for each in self.replicas:
            self._follow(each)

    def _follow(self, replica: Replica) -> None:
        replica.engine.keeper = self._mover
        self._chooser.follow(replica)

    def _append(self, replica: Replica) -> None:
        replica.number = next(self._numbers)
        self.replicas.append(replica)

    async def stop(self) -> None:
        self._give_up()
        for each in self.replicas:
            each.engine.keeper = each.engine.on_prefixes = None  # nothing moves on to one that ends a moment later
        await asyncio.gather(self._holder.stop(), *(each.engine.stop() for each in self.replicas))

    def _give_up(self) -> None:
        """Take no requests from now on, and end those that wait for a first engine."""
        self._failure = "the engine was stopped"
        if self._room is not None:
            self._room.close(SluiceError(ErrorCode.UNAVAILABLE, self._failure))

    def kill(self) -> None:
        for each in self.replicas:
            each.engine.kill()

    # -- requests

    def session_replica(self, session: str) -> str:
        """Return the replica that had the session's last request; "" where none is known."""
        return self._chooser.session_replica(session)

    def submit(self, request: GenerateRequest) -> GenerationStream:
        if (failure := self.failure) is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, failure)
        if not self.replicas:
            raise SluiceError(ErrorCode.UNAVAILABLE, NO_ENGINE, retry_after_s=RETRY_S)
        check_lengths(request, self.info)  # it must fit each replica, as it may have to move there
        check_adapter(request.adapter, self.info)
        offer = self._chooser.next_offer(request, {})
        if offer is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, NO_ENGINE, retry_after_s=RETRY_S)
        stream = self.handover.submit(request, offer)
        offer.replica.num_routed += 1
        return stream

    def refuse_if_full(self) -> None:
        """Raise OVERLOADED where each replica that serves has a full queue, with the least time to wait for one."""
        if self._room is not None and self.is_asleep:
            self._room.refuse_if_full()
        full: list[SluiceError] = []
        for each in self.replicas:
            if each.engine.is_serving and not each.is_draining:
                try:
                    each.engine.refuse_if_full()
                except SluiceError as error:
                    full.append(error)
                else:
                    return
        if full:
            raise min(full, key=lambda error: error.retry_after_s or 0.0)

    def abort_all(self, error: SluiceError) -> None:
        for engine in (self._holder, *(each.engine for each in self.replicas)):
            engine.abort_all(error)

    # -- changes of all engines

    @property
    def is_sleeping(self) -> bool:
        """Whether one of the engines was put to sleep."""
        return any(each.engine.is_sleeping for each in self._alive())

    async def sleep(self, level: int = 1, mode: SleepMode = "abort") -> None:
        """Have all engines stop generating. Raises the first error of one that cannot; the others sleep then."""
        await _for_all(each.engine.sleep(level, mode) for each in self._alive())

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Have all engines go on. Raises the first error of one that cannot; the others are awake then."""
        await _for_all(each.engine.wake_up(tags) for each in self._alive())

    @property
    def adapters(self) -> Mapping[str, str]:
        return dict(ChainMap(*(each.engine.adapters for each in self._alive())))

    @property
    def adapter_marks(self) -> Mapping[str, str]:
        return dict(ChainMap(*(each.engine.adapter_marks for each in self._alive())))

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter in all engines, or in none. Raises the error of the replica that does not take it, in
        whose words it says which."""
        async with self._changing:
            replicas = self._all_serving()
            before = {each.name: each.engine.adapters.get(name) for each in replicas}
            for number, each in enumerate(replicas):
                try:
                    await each.engine.load_adapter(name, path, replaces=replaces)
                except SluiceError as error:
                    for changed in replicas[:number]:
                        await _restore_adapter(changed, name, before[changed.name])
                    raise _of(each, error) from error

    async def unload_adapter(self, name: str) -> None:
        """Remove a LoRA adapter from all engines. Raises NOT_FOUND where no replica has it."""
        async with self._changing:
            replicas = self._all_serving()
            having = [each for each in replicas if name in each.engine.info.adapters]
            for each in having or replicas[:1]:
                try:
                    await each.engine.unload_adapter(name)
                except SluiceError as error:
                    raise _of(each, error) if having else error from error

    def _all_serving(self) -> list[Replica]:
        """Return the replicas that are not given up. Raises UNAVAILABLE where one of them does not serve."""
        replicas = self._alive()
        for each in replicas:
            if not each.engine.is_serving:
                message = f"replica {each.name} is restarting; adapters change when all replicas serve"
                raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=1.0)
        return replicas


Engine = EngineClient | FleetClient
"""The engine of a model: one, or several as one."""


async def _restore_adapter(replica: Replica, name: str, path: str | None) -> None:
    """Bring the adapter of a replica back to what it was: the folder `path`, or none."""
    try:
        if path is None:
            await replica.engine.unload_adapter(name)
        else:
            await replica.engine.load_adapter(name, path, replaces=True)
    except SluiceError as error:
        log.error("replica %s keeps a LoRA adapter %s that others do not have: %s", replica.name, name, error.message)


def _of(replica: Replica, error: SluiceError) -> SluiceError:
    return error.reworded(f"replica {replica.name}: {error.message}")


async def _for_all(changes: Iterable[Awaitable[None]]) -> None:
    outcomes = await asyncio.gather(*changes, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome


def check_agreement(first: Replica, other: Replica) -> None:
    """Raise INVALID where two replicas do not serve the same model in the same way, naming what differs."""
    for field in _AGREED:
        expected, got = (getattr(each.engine.info, field) for each in (first, other))
        if expected != got:
            ours, theirs = f"replica {first.name} has {expected}", f"replica {other.name} {got}"
            raise invalid(field, f"replicas of one model must have the same {field}: {ours}, {theirs}")


def _merge_infos(parts: Sequence[EngineInfo]) -> EngineInfo:
    first = parts[0]
    return msgspec.structs.replace(
        first,
        num_blocks=min(part.num_blocks for part in parts),
        total_blocks=sum(part.num_blocks for part in parts),
        max_num_seqs=sum(part.max_num_seqs for part in parts),
        num_gpus=sum(part.num_gpus for part in parts),
        load_seconds=max(part.load_seconds for part in parts),
        adapters=tuple(sorted({name for part in parts for name in part.adapters})),
        adapter_digests=dict(ChainMap(*(part.adapter_digests for part in parts))),
        sampling_fields=tuple(f for f in first.sampling_fields if all(f in part.sampling_fields for part in parts)),
        refused_sampling=dict(ChainMap(*(part.refused_sampling for part in parts))),
        grammar_kinds=tuple(k for k in first.grammar_kinds if all(k in part.grammar_kinds for part in parts)),
        is_prefill=all(part.is_prefill for part in parts),
        gives_logits=all(part.gives_logits for part in parts),
        can_sleep=all(part.can_sleep for part in parts),
    )
