"""The client of several engines of one model, which the rooms above use as one engine.

A request goes to one replica, and its stream belongs to that replica's client: nothing here happens for each token.
The engine alone admits; one that cannot do so soon enough says so, and the request is offered to the next. Where a
replica is lost, its streams move to others at once (`StreamMover`)."""

import asyncio
import itertools
import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from math import inf
from time import perf_counter

import msgspec

from sluice.engine.client.counters import NO_STATS, sum_stats
from sluice.engine.client.stream import GenerationStream
from sluice.engine.client.timers import Clock
from sluice.engine.config import EngineConfig, Task
from sluice.engine.fleet.changes import FleetAdapters, FleetSleep
from sluice.engine.fleet.choosing import ReplicaChooser
from sluice.engine.fleet.handover import PromptHandover
from sluice.engine.fleet.holding import StreamHolder
from sluice.engine.fleet.joining import MakeClient, MemberJoiner
from sluice.engine.fleet.membership.members import Member, Membership
from sluice.engine.fleet.moving import ReplicaKeeper, StreamMover
from sluice.engine.fleet.offering import OfferMaker
from sluice.engine.fleet.replica import PastReplicas, Replica, check_agreement
from sluice.engine.fleet.router import DEFAULT_ROUTING, RouterSettings
from sluice.engine.fleet.splitting import MIN_TOKENS
from sluice.engine.fleet.waking import WakeSettings, WakingRoom, presume_info
from sluice.engine.model_folder import served_task
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, GenerateRequest
from sluice.engine.validation import check_adapter, check_lengths
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

_RETRY_S = 1.0
_FIRST_JOIN_S = 2.0
"""How long the start waits for an engine that need not be there."""
_NO_ENGINE = "no engine of this model can be reached"


class FleetClient:
    """Serves with several engines. Implements `sluice.engine.client.interface.Engine`; all methods run on one event
    loop."""

    def __init__(
        self,
        config: EngineConfig,
        replicas: Sequence[Replica] = (),
        routing: RouterSettings = DEFAULT_ROUTING,
        *,
        membership: Membership | None = None,
        make_client: MakeClient | None = None,
        drain_s: float = 30.0,
        wake: WakeSettings | None = None,
        min_split_tokens: int = MIN_TOKENS,
        clock: Clock = perf_counter,
    ) -> None:
        """Take the clients of engines, which have not started, or a `membership` that names engines, for which
        `make_client` makes clients, and whose streams have `drain_s` to end where one leaves. `config` is what the
        server was told, before it was split between them. `routing` says how replicas are chosen. With
        `wake` requests are held while the membership names no engine, also at the start. Prefill replicas compute
        prompts of which another replica would have `min_split_tokens` to compute."""
        self.config = config
        self.routing = routing
        self.replicas: list[Replica] = []
        self.sleeping = FleetSleep(self._alive)
        self._adapters = FleetAdapters(self._alive)
        self._numbers = itertools.count()
        self._chooser = ReplicaChooser(routing)
        self._offers = OfferMaker(self.replicas, self._chooser)
        self.min_split_tokens = min_split_tokens
        self.handover = PromptHandover(self.replicas, self._chooser, min_split_tokens)
        self._room = None if wake is None else WakingRoom(wake, clock)
        self._holder = StreamHolder(config, self._room, clock)
        self._mover = StreamMover(self.replicas, self._offers, self._chooser.index, self._holder)
        self._summed: tuple[list[EngineStats], EngineStats] = ([], NO_STATS)
        self._merged: tuple[list[EngineInfo], EngineInfo | None] = ([], None)
        self._past = PastReplicas()
        self._failure: str | None = None
        self.has_begun = False
        """Whether a replica has ever joined."""
        self._presumed: EngineInfo | None = None
        self._joiner: MemberJoiner | None = None
        if membership is not None and make_client is not None:
            self._joiner = MemberJoiner(membership, make_client, self.join, self.remove, drain_s)
        for each in replicas:
            self._append(each)

    # -- facts

    def _alive(self) -> list[Replica]:
        return [each for each in self.replicas if each.engine.failure is None]

    def _staying(self) -> list[Replica]:
        return [each for each in self._alive() if not each.is_leaving]

    @property
    def members(self) -> tuple[Member, ...] | None:
        """The engines elsewhere that are named now, none while no replica stays; None for a fleet of engines here."""
        if self._joiner is None:
            return None
        return self._joiner.members if self._staying() else ()

    @property
    def info(self) -> EngineInfo:
        """The limits of the smallest replica, on which requests may rely, and the capacity and the LoRA
        adapters of all together; of the last ones while there are none. Raises UNAVAILABLE before `start` has
        returned."""
        parts = [each.engine.info for each in self._alive() or self.replicas]
        known, merged = self._merged
        if not parts:
            if merged is None and self._presumed is None:
                raise SluiceError(ErrorCode.UNAVAILABLE, _NO_ENGINE)
            return merged or self._presumed  # type: ignore[return-value]
        if merged is None or len(known) != len(parts) or any(a is not b for a, b in zip(known, parts, strict=True)):
            merged = _merge_infos(parts)
            self._merged = parts, merged
        return merged

    @property
    def stats(self) -> EngineStats:
        """The sums over all replicas. The predicted wait is the least, because a request goes there."""
        parts = [self._past.stats, *(each.engine.stats for each in self.replicas)]
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
        """Why there is no engine any more; None while one lives, is being restarted or may still join."""
        if self._failure is not None or self._joiner is not None:
            return self._failure
        reasons = [each.engine.failure for each in self.replicas]
        return next(iter(reasons), "there is no replica") if all(reason is not None for reason in reasons) else None

    @property
    def can_restart(self) -> bool:
        return self._joiner is not None or any(each.engine.can_restart for each in self.replicas)

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
        while self._room is not None and self.is_asleep:
            await self._room.wait()

    @property
    def num_restarts(self) -> int:
        return self._past.num_restarts + sum(each.engine.num_restarts for each in self.replicas)

    @property
    def recovery_seconds_total(self) -> float:
        now = sum(each.engine.recovery_seconds_total for each in self.replicas)
        return self._past.recovery_seconds_total + now

    @property
    def last_recovery_s(self) -> float:
        return max((each.engine.last_recovery_s for each in self.replicas), default=0.0)

    @property
    def num_resumed(self) -> int:
        return self._past.num_resumed + sum(each.engine.num_resumed for each in self.replicas)

    @property
    def num_poisoned(self) -> int:
        return self._past.num_poisoned + sum(each.engine.num_poisoned for each in self.replicas)

    @property
    def adapters(self) -> Mapping[str, str]:
        return dict(ChainMap(*(each.engine.adapters for each in self._alive())))

    @property
    def adapter_marks(self) -> Mapping[str, str]:
        return dict(ChainMap(*(each.engine.adapter_marks for each in self._alive())))

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
        INVALID where they do not agree; all engines have ended then. With a membership, wait for the first member.
        Where requests can wait for it, this does so for a moment only, and the checkpoint says what is known."""
        if self._joiner is not None:
            may_sleep = self._room is not None and served_task(self.config) is Task.GENERATE
            self._presumed = await asyncio.to_thread(presume_info, self.config) if may_sleep else None
            await self._joiner.start(_FIRST_JOIN_S if may_sleep else None)
            return
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
        replica.engine.keeper = ReplicaKeeper(self._mover, replica)
        self._chooser.follow(replica)

    def _append(self, replica: Replica) -> None:
        replica.number = next(self._numbers)
        self.replicas.append(replica)

    async def join(self, replica: Replica) -> None:
        """Take a replica that serves, and load the adapters there that were loaded in the others from here. Raises
        INVALID where it does not agree with the others."""
        alive = self._alive()
        if alive:
            check_agreement(alive[0], replica)
        await self._adapters.share_with(replica)
        self.has_begun = True
        self._append(replica)
        assert self.info is not None  # known from now on, also while there is no replica
        self._follow(replica)
        self._mover.on_back(replica)

    async def remove(self, replica: Replica) -> None:
        """Let a replica leave: its streams go on in others, or are held until there is one, and its client is
        stopped. Where it was the last and none is waited for, they end in an error."""
        replica.is_draining = True
        self._mover.on_leaving(replica)
        replica.engine.keeper = replica.engine.on_prefixes = None
        self.replicas.remove(replica)
        self._past.add(replica)
        self._chooser.index.forget(replica.number)
        if not self.replicas:
            self._holder.give_up(_NO_ENGINE, _RETRY_S)
        await replica.engine.stop()

    async def stop(self) -> None:
        self._failure = "the engine was stopped"
        if self._room is not None:
            self._room.close(SluiceError(ErrorCode.UNAVAILABLE, self._failure))
        if self._joiner is not None:
            await self._joiner.stop()
        for each in self.replicas:
            each.engine.keeper = each.engine.on_prefixes = None  # nothing moves on to one that ends a moment later
        await asyncio.gather(self._holder.stop(), *(each.engine.stop() for each in self.replicas))

    def kill(self) -> None:
        for each in self.replicas:
            each.engine.kill()

    # -- requests

    def submit(self, request: GenerateRequest) -> GenerationStream:
        if (failure := self.failure) is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, failure)
        if not self.replicas:
            raise SluiceError(ErrorCode.UNAVAILABLE, _NO_ENGINE, retry_after_s=_RETRY_S)
        check_lengths(request, self.info)  # it must fit each replica, as it may have to move there
        check_adapter(request.adapter, self.info)
        offer = self._offers.make_next(request, {})
        if offer is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, _NO_ENGINE, retry_after_s=_RETRY_S)
        stream = self.handover.submit(request, offer)
        offer.replica.num_routed += 1
        return stream

    def leading_blocks(self, request: GenerateRequest) -> Sequence[int]:
        """Return how many leading blocks of the prompt each replica is thought to have, by its number."""
        return self._chooser.leading_blocks(request, self.info)

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

    # -- changes

    async def load_adapter(self, name: str, path: str, *, replaces: bool = False) -> None:
        """Load a LoRA adapter in all engines, or in none. Raises the error of the one that does not take it."""
        await self._adapters.load(name, path, replaces=replaces)

    async def unload_adapter(self, name: str) -> None:
        await self._adapters.unload(name)


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
