"""The choice of a replica for a request: gathers what the router (`sluice.engine.fleet.router`) decides by."""

import secrets
from collections.abc import Iterable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple

import msgspec

from sluice.engine.blocks import HashChain
from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.engine.fleet.replica import Replica
from sluice.engine.fleet.router import Choice, RoutedRequest, RouterSettings, RoutingPolicy, choose
from sluice.engine.fleet.sessions import SessionPlaces
from sluice.engine.frames import PrefixChanges
from sluice.engine.types import EngineInfo, GenerateRequest

MAX_HASHED_BLOCKS = 4096
"""Blocks of a prompt that are looked up, 131,072 tokens in blocks of 32: their hashes take some 5 ms of the loop."""


class Pick(NamedTuple):
    """The chosen replica, and by its statistics the seconds that the request costs there, and those that it waits."""

    replica: Replica
    cost_s: float
    wait_s: float
    num_cached_tokens: int
    choice: Choice


class ReplicaChooser:
    """Chooses for the requests of one fleet, on its event loop."""

    def __init__(self, routing: RouterSettings) -> None:
        """`routing` gets a seed of this chooser's own."""
        self.index = PrefixIndex()
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
        views = [each.view() for each in candidates]
        names = [each.name for each in candidates]
        choice = choose(self._routed(request, candidates[0].engine.info, names), views, self.index, self._settings)
        wait_s = choice.parts.get("wait", 0.0)
        return Pick(by_number[choice.replica.number], choice.cost_s, wait_s, choice.num_cached_tokens, choice)

    def leading_blocks(self, request: GenerateRequest, info: EngineInfo) -> Sequence[int]:
        """Return how many leading blocks of the prompt each replica is thought to have, by its number."""
        return self.index.leading_blocks(self._routed(request, info).block_hashes)

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
        replica.note_sent(max(len(request.prompt_token_ids) - pick.num_cached_tokens, 0))
        self.note_place(request, replica)
        if self._settings.policy is RoutingPolicy.PREFIX:
            hashes = self._routed(request, replica.engine.info).block_hashes
            self.index.expect(replica.number, hashes, perf_counter())

    def note_place(self, request: GenerateRequest, replica: Replica) -> None:
        """Note that the replica has the request, where the next one of its session goes if it can."""
        if request.session:
            self._sessions.note(request.session, replica.name)

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
