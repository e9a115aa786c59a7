"""The choice of a replica for a request, and the offers that follow from it.

The router (`sluice.engine.fleet.router`) decides; what it decides by is gathered here. Statistics are old by the time
that a request arrives, and several gateways send at once, so the engine alone admits. It is told how long the request
would wait at the next best replica, and refuses it where it would take longer itself. When all have refused, the
request is queued where its wait was predicted to be the shortest.
"""

import logging
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from time import perf_counter
from typing import NamedTuple

import msgspec

from sluice.engine.blocks import HashChain
from sluice.engine.client.base import Replica
from sluice.engine.client.supervision import Clock
from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.engine.fleet.router import ReplicaChoice, ReplicaView, RoutedRequest, RouterSettings, RoutingPolicy, choose
from sluice.engine.frames import PrefixChanges
from sluice.engine.statistics import EngineStats
from sluice.engine.types import EngineInfo, GenerateRequest, RequestFailed

log = logging.getLogger(__name__)

MAX_HASHED_BLOCKS = 4096
"""Blocks of a prompt that are looked up, 131,072 tokens in blocks of 32: their hashes take some 5 ms of the loop."""
SLACK_S = 0.05
"""Another replica must save at least this much: asking it takes time too, and predictions are not exact."""
MAX_SESSIONS = 65_536
"""Sessions that are remembered; beyond, those are forgotten that have sent nothing for the longest time."""


class Pick(NamedTuple):
    """The chosen replica, and by its statistics the seconds that the request costs there, and those that it waits."""

    replica: Replica
    cost_s: float
    wait_s: float
    num_cached_tokens: int
    choice: ReplicaChoice


class Offer(NamedTuple):
    """A replica to send a request to, and the longest wait that it may have there; None for any."""

    replica: Replica
    most_wait_s: float | None
    num_cached_tokens: int = 0
    """Tokens of the prompt that the replica is thought to have in its prefix cache."""


class _Load:
    """The load of a replica: its last statistics, and what was sent to it that they do not show yet."""

    __slots__ = ("num_sent", "sent_tokens", "stats", "view")

    def __init__(self, stats: EngineStats) -> None:
        self.stats = stats
        self.num_sent = self.sent_tokens = 0
        self.view: ReplicaView | None = None
        """The router's view of the replica; None where it is to be made anew."""


class ReplicaChooser:
    """Chooses for the requests of one fleet, on its event loop."""

    def __init__(self, replicas: Sequence[Replica], routing: RouterSettings) -> None:
        """`replicas` may change later. `routing` gets a seed of this chooser's own."""
        self.replicas = replicas
        self.index = PrefixIndex()
        self._loads: dict[int, _Load] = {}
        self._settings = msgspec.structs.replace(routing, seed=secrets.randbits(16))
        self._sessions = SessionPlaces(routing.session_ttl_s)
        self._asked_anew: set[int] = set()
        """The replicas whose reports had a gap, and that have not begun anew yet."""
        self._ticket = 0
        self._last: tuple[GenerateRequest, RoutedRequest] | None = None
        """The last request, which is mostly the next one too: the second best replica is chosen after the best."""

    @property
    def compares_waits(self) -> bool:
        """Whether a request goes elsewhere where that is sooner."""
        return self._settings.policy is not RoutingPolicy.ROUND_ROBIN

    def choose(self, request: GenerateRequest, candidates: Sequence[Replica]) -> Pick | None:
        """Return the best of the candidates, which all have the request's adapter; None without any."""
        if not candidates:
            return None
        by_number = {each.number: each for each in candidates}
        views = [self._view(each) for each in candidates]
        names = [each.name for each in candidates]
        choice = choose(self._routed(request, candidates[0].engine.info, names), views, self.index, self._settings)
        wait_s = choice.parts.get("wait", 0.0)
        return Pick(by_number[choice.replica.number], choice.cost_s, wait_s, choice.num_cached_tokens, choice)

    def next_offer(self, request: GenerateRequest, refusals: Mapping[str, RequestFailed]) -> Offer | None:
        """Return the next offer of a request that these replicas have refused; None where there is nobody left to ask,
        because all are full or given up."""
        waits = {name: each.predicted_wait_s for name, each in refusals.items() if each.predicted_wait_s is not None}
        able = (each for each in self.replicas if each.has_adapter(request.adapter))
        candidates = find_candidates(each for each in able if each.name in waits or each.name not in refusals)
        if refusals:  # who was asked already does not wait for an engine: that queue has another limit
            candidates = [each for each in candidates if each.engine.is_serving]
        untried = [each for each in candidates if each.name not in refusals]
        best = self.choose(request, untried)
        if best is not None:
            others = [each for each in untried if each is not best.replica]
            other = self.choose(request, others) if self.compares_waits else None
            bound = _bound(best, other, refusals) if self.compares_waits else None
            self.note_sent(request, best)
            log.debug(
                "request %s goes to replica %s, with %d of its tokens cached and %s: %s",
                *(request.request_id, best.replica.name, best.num_cached_tokens, _bound_text(bound), best.choice.parts),
            )
            return Offer(best.replica, bound, best.num_cached_tokens)
        if not candidates:
            return None
        soonest = min(candidates, key=lambda each: waits[each.name])
        self.note_place(request, soonest)
        return Offer(soonest, None)

    def find_home(self, request: GenerateRequest, source: Replica) -> Replica | None:
        """Return where a stream of `source` goes on; None where no other replica can take it."""
        candidates = find_candidates(e for e in self.replicas if e is not source and e.has_adapter(request.adapter))
        pick = self.choose(request, candidates)
        if pick is None:
            return None
        self.note_sent(request, pick)
        return pick.replica

    def follow(self, replica: Replica) -> None:
        """Hear from now on what the replica's prefix cache has."""
        if self._settings.policy is RoutingPolicy.PREFIX:
            replica.engine.on_prefixes = partial(self._apply, replica)

    def _apply(self, replica: Replica, changes: PrefixChanges) -> None:
        """Apply a report. Where one is missing before it, the replica says anew what it has, once: reports that are on
        the way until then are of no use either."""
        number = replica.number
        is_whole = self.index.apply(number, changes.number, changes.stored, changes.removed, changes.is_first)
        if is_whole:
            self._asked_anew.discard(number)
        elif number not in self._asked_anew:
            self._asked_anew.add(number)
            replica.engine.restart_prefixes()

    def note_sent(self, request: GenerateRequest, pick: Pick) -> None:
        """Count the request as the replica's from now on: in its load, and in what its prefix cache will have."""
        replica = pick.replica
        load = self._load(replica)
        load.num_sent += 1
        load.sent_tokens += max(len(request.prompt_token_ids) - pick.num_cached_tokens, 0)
        load.view = None
        self.note_place(request, replica)
        if self._settings.policy is RoutingPolicy.PREFIX:
            hashes = self._routed(request, replica.engine.info).block_hashes
            self.index.expect(replica.number, hashes, perf_counter())

    def note_place(self, request: GenerateRequest, replica: Replica) -> None:
        """Note that the replica has the request, where the next one of its session goes if it can."""
        if request.session:
            self._sessions.note(request.session, replica.name)

    def session_replica(self, session: str) -> str:
        """Return the name of the replica that had the session's last request; "" where none is known."""
        return self._sessions.last(session)

    def forget(self, replica: Replica) -> None:
        """Forget a replica that has left."""
        self.index.forget(replica.number)
        self._loads.pop(replica.number, None)

    def _load(self, replica: Replica) -> _Load:
        load = self._loads.get(replica.number)
        if load is None or load.stats is not replica.engine.stats:
            load = self._loads[replica.number] = _Load(replica.engine.stats)
        return load

    def _view(self, replica: Replica) -> ReplicaView:
        load = self._load(replica)
        if load.view is None:
            load.view = _make_view(replica, load)
        return load.view

    def _routed(self, request: GenerateRequest, info: EngineInfo, names: Sequence[str] = ()) -> RoutedRequest:
        """Return what the router sees of the request; the same for the same request. Its session's replica is one of
        those that it was first to choose from, `names`: the second best is no better for being without it."""
        if self._last is not None and self._last[0] is request:
            return self._last[1]
        self._ticket += 1
        hashes: Sequence[bytes] = ()
        if self._settings.policy is RoutingPolicy.PREFIX:
            num_blocks = min(len(request.prompt_token_ids) // info.block_size, MAX_HASHED_BLOCKS)
            hashes = hash_chain(request, info).hashes(request.prompt_token_ids, num_blocks)
        routed = RoutedRequest(
            ticket=self._ticket,
            num_prompt_tokens=len(request.prompt_token_ids) + len(request.resume_token_ids),
            max_tokens=request.sampling.max_tokens,
            block_hashes=hashes,
            session=request.session,
            session_replica=self._sessions.find(request.session, names) if request.session else "",
        )
        self._last = request, routed
        return routed


class SessionPlaces:
    """Remembers the replicas of sessions, by name. Belongs to the fleet's event loop."""

    def __init__(self, ttl_s: float, max_sessions: int = MAX_SESSIONS, clock: Clock = perf_counter) -> None:
        """A session is forgotten `ttl_s` after its last request."""
        self._ttl_s = ttl_s
        self._max_sessions = max_sessions
        self._clock = clock
        self._places: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """The replica of each session and when it got the last request, the oldest first."""

    def __len__(self) -> int:
        return len(self._places)

    def find(self, session: str, names: Iterable[str]) -> str:
        """Return which of the replicas `names` is the session's: the one that had its last request; of a session that
        is not known, or whose replica is not among them, the one that each gateway with these replicas would name."""
        place, noted_at = self._places.get(session, ("", 0.0))
        known = list(names)
        if place in known and self._clock() - noted_at <= self._ttl_s:
            return place
        return max(known, key=lambda name: _rank(session, name), default="")

    def last(self, session: str) -> str:
        """Return the replica that had the session's last request; "" where none is known."""
        return self._places.get(session, ("", 0.0))[0]

    def note(self, session: str, name: str) -> None:
        """Note that the replica `name` has got a request of the session."""
        now = self._clock()
        self._places[session] = name, now
        self._places.move_to_end(session)
        while self._places:
            _, noted_at = next(iter(self._places.values()))
            if len(self._places) <= self._max_sessions and now - noted_at <= self._ttl_s:
                break
            self._places.popitem(last=False)


def _make_view(replica: Replica, load: _Load) -> ReplicaView:
    stats, info = load.stats, replica.engine.info
    return ReplicaView(
        name=replica.name,
        number=replica.number,
        num_free_blocks=stats.num_blocks_free,
        num_reserved_blocks=stats.num_blocks_reserved,
        num_blocks=info.num_blocks,
        block_size=info.block_size,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        num_tokens_waiting=stats.num_tokens_waiting,
        predicted_wait_s=stats.predicted_wait_s,
        prefill_tokens_per_s=stats.prefill_tokens_per_s,
        decode_seconds_per_step=stats.decode_step_s,
        version=replica.version,
        weight=replica.weight or 1.0,  # one without weight is asked only where there is no other
        num_sent=load.num_sent,
        sent_tokens=load.sent_tokens,
        prefilling_tokens=replica.engine.prefilling_tokens,
    )


def hash_chain(request: GenerateRequest, info: EngineInfo) -> HashChain:
    """Return the chain of the request's block hashes, as the engines have it."""
    adapter = info.adapter_digests.get(request.adapter, request.adapter)
    return HashChain(request.cache_salt, info.block_size, adapter)


def find_candidates(replicas: Iterable[Replica]) -> list[Replica]:
    """Return the replicas that may get a request now, all of the best kind that there is: those that take requests at
    once, those that probe, those that restart, those that leave the fleet. Replicas that are there for prompts count
    where no other serves."""
    alive = [each for each in replicas if each.engine.failure is None]
    staying = [each for each in alive if not each.is_leaving and each.weight > 0.0]
    generating = [each for each in staying if not each.is_prefill]
    if any(each.engine.is_serving for each in generating):
        staying = generating
    open_ = [each for each in staying if each.engine.is_open]
    return open_ or [each for each in staying if each.engine.is_serving] or staying or alive


def _bound_text(bound: float | None) -> str:
    return "however long it waits" if bound is None else f"if it waits for at most {bound:.2f} s"


def _bound(best: Pick, other: Pick | None, refusals: Mapping[str, RequestFailed]) -> float | None:
    """Return the wait from which on another replica would be better than the best one; None without another."""
    waits = [each.predicted_wait_s for each in refusals.values() if each.predicted_wait_s is not None]
    if other is not None:
        waits.append(other.cost_s - (best.cost_s - best.wait_s))
    return max(min(waits), 0.0) + SLACK_S if waits else None


def _rank(session: str, name: str) -> bytes:
    """Return how a replica ranks for a session: the same everywhere, and independent of the other replicas."""
    return blake2b(f"{session}\0{name}".encode(), digest_size=8).digest()
