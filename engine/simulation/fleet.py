"""A fleet in simulated time: requests come, the router chooses, replicas compute. The router is the gateway's, or
another one that is told the same."""

import heapq
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sluice.engine.blocks import BlockHash
from sluice.engine.config import SchedulerPolicy
from sluice.engine.fleet.prefix_index import PrefixIndex
from sluice.engine.fleet.router import ReplicaView, RoutedRequest, RouterSettings, RoutingPolicy, choose
from sluice.engine.scheduling.planner import find_policy
from sluice.engine.simulation.profile import ReplicaProfile
from sluice.engine.simulation.replica import SimulatedReplica, TracedSequence
from sluice.engine.simulation.traces import InfiniteCache, TracedRequest, block_hashes


class SimulatedRouter(ABC):
    """A router as the simulation drives it, which need not hear what becomes of requests. These have the numbers of
    their places in the trace."""

    name: str

    @abstractmethod
    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        """Return the number of the replica that gets a request. `hashes` are those of the prompt's full blocks."""

    def note_changes(self, replica: int, stored: bytes, removed: bytes) -> None:  # noqa: B027 - most need not know
        """Take the hashes of blocks that a replica's cache has stored and removed."""

    def note_first_token(self, number: int) -> None:  # noqa: B027 - most need not know
        """Take that a request has its first token."""

    def note_end(self, number: int) -> None:  # noqa: B027 - most need not know
        """Take that a request has all its tokens."""


class FleetRouter(SimulatedRouter):
    """The router of a gateway, with its prefix index and the replica of each session's last request."""

    def __init__(self, settings: RouterSettings, num_replicas: int, num_blocks: int) -> None:
        """`num_blocks` is what one replica's cache has room for."""
        self.name = str(settings.policy)
        self._settings = settings
        self._has_index = settings.policy is RoutingPolicy.PREFIX
        self._index = PrefixIndex(max_blocks=2 * num_replicas * num_blocks + 1024)
        self._numbers = [0] * num_replicas
        if self._has_index:
            for number in range(num_replicas):
                self._index.apply(number, 0, b"", b"", True)
        self._sessions: dict[str, str] = {}

    def choose(
        self,
        number: int,
        request: TracedRequest,
        hashes: Sequence[BlockHash],
        replicas: Sequence[ReplicaView],
        now: float,
    ) -> int:
        routed = RoutedRequest(
            ticket=number,
            num_prompt_tokens=request.num_prompt,
            max_tokens=request.max_tokens or request.num_output,
            block_hashes=hashes,
            session=request.session,
            session_replica=self._sessions.get(request.session, "") if request.session else "",
        )
        replica = choose(routed, replicas, self._index, self._settings).replica
        if request.session:
            self._sessions[request.session] = replica.name
        if self._has_index:
            self._index.expect(replica.number, hashes, now)
        return replica.number

    def note_changes(self, replica: int, stored: bytes, removed: bytes) -> None:
        if self._has_index:
            self._numbers[replica] += 1
            self._index.apply(replica, self._numbers[replica], stored, removed, False)


SHORTEST_S, BINS_PER_E = 1e-6, 200
NUM_BINS = 4096
"""The bins reach from a microsecond to about ten minutes, each half a percent longer than the last."""


class GapCounts:
    """Counts many gaps in bins. Their quantiles are exact to half a percent."""

    def __init__(self) -> None:
        self._counts = np.zeros(NUM_BINS, np.int64)
        self._sum_s = 0.0
        self.longest_s = 0.0

    @property
    def num_gaps(self) -> int:
        return int(self._counts.sum())

    @property
    def mean_s(self) -> float:
        return self._sum_s / max(self.num_gaps, 1)

    def add(self, gaps_s: Sequence[float], counts: Sequence[int]) -> float:
        """Count a sequence's gaps, each as often as `counts` says. Returns their own 99th percentile, 0 without any."""
        if not len(gaps_s):
            return 0.0
        gaps, times = np.array(gaps_s), np.array(counts)
        bins = (np.log(np.maximum(gaps, SHORTEST_S) / SHORTEST_S) * BINS_PER_E).astype(np.int64)
        np.add.at(self._counts, np.minimum(bins, NUM_BINS - 1), times)
        self._sum_s += float(gaps @ times)
        self.longest_s = max(self.longest_s, float(gaps.max()))
        order = np.argsort(gaps)
        reached = np.cumsum(times[order])
        return float(gaps[order][np.searchsorted(reached, 0.99 * reached[-1])])

    def quantile(self, part: float) -> float:
        """Return the gap in seconds that a part of all gaps does not exceed; NaN without any."""
        reached = np.cumsum(self._counts)
        if not reached[-1]:
            return float("nan")
        place = int(np.searchsorted(reached, max(part * reached[-1], 1)))
        return min(SHORTEST_S * float(np.exp((place + 0.5) / BINS_PER_E)), self.longest_s)


Floats = NDArray[np.float64]
REPORT_EVERY = 256
"""Requests between two reports of progress."""


class FleetConfig(NamedTuple):
    """The fleet to simulate."""

    profile: ReplicaProfile
    num_replicas: int
    router: RouterSettings = RouterSettings()
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT


class ReplicaTotals(NamedTuple):
    """The work of one replica."""

    num_requests: int
    busy_s: float
    num_steps: int
    num_computed_tokens: int
    """Tokens of prompts that it computed."""


class FleetRun(NamedTuple):
    """A simulated run. The arrays have a value for each request of the trace, in its order; times are seconds, NaN for
    requests that were rejected."""

    config: FleetConfig
    router: str
    requests: Sequence[TracedRequest]
    replica: NDArray[np.int32]
    """The replica that had it; -1 for a request that no replica can ever hold."""
    wait_s: Floats
    """From its arrival to its admission."""
    ttft_s: Floats
    e2e_s: Floats
    itl_p99_s: Floats
    """The 99th percentile of its own gaps; 0 for a single token."""
    num_cached: NDArray[np.int64]
    num_shareable: int
    """Tokens of prompts that one infinite cache would have had."""
    gaps: GapCounts
    """The gaps between all tokens."""
    totals: tuple[ReplicaTotals, ...]
    end_s: float
    """When the last token came."""

    @property
    def tpot_s(self) -> Floats:
        """The mean time between the tokens of each answer that has two, of those that were not rejected."""
        lengths = np.array([request.num_output for request in self.requests])
        has_two = (self.replica >= 0) & (lengths > 1)
        seconds: Floats = (self.e2e_s - self.ttft_s)[has_two] / (lengths[has_two] - 1)
        return seconds


def simulate(
    requests: Sequence[TracedRequest],
    config: FleetConfig,
    report: Callable[[int], None] | None = None,
    router: SimulatedRouter | None = None,
    concurrency: int | None = None,
) -> FleetRun:
    """Let the fleet serve the requests, which are in the order of their times. `report` is told now and then how many
    have ended. `router` chooses instead of the one that `config` describes. With a `concurrency`, so many clients send
    them instead, each its next one when its last has ended. The same arguments give the same run, if such a router
    always chooses the same."""
    if router is None:
        router = FleetRouter(config.router, config.num_replicas, config.profile.num_blocks)
    return _Simulation(requests, config, router, report, concurrency).run()


class _Simulation:
    """The state of one run."""

    def __init__(
        self,
        requests: Sequence[TracedRequest],
        config: FleetConfig,
        router: SimulatedRouter,
        report: Callable[[int], None] | None,
        concurrency: int | None,
    ) -> None:
        self._requests, self._config, self._router, self._report = list(requests), config, router, report
        self._free_at = None if concurrency is None else deque([0.0] * concurrency)
        """Since when each client is free that waits for nothing; None where requests come at times of their own."""
        policy, profile = find_policy(config.policy), config.profile
        self._info = profile.engine_info()
        self._replicas = [
            SimulatedReplica(number, profile, policy, router.note_first_token, self._end)
            for number in range(config.num_replicas)
        ]
        self._views: list[ReplicaView | None] = [None] * config.num_replicas
        self._due: list[tuple[float, int]] = []
        """When the steps of replicas end, and steps that have ended earlier than was planned."""
        self._num_ended = 0
        self._end_s = 0.0
        size = len(requests)
        self._replica = np.full(size, -1, np.int32)
        self._times = np.full((4, size), math.nan)
        self._num_cached = np.zeros(size, np.int64)
        self._gaps = GapCounts()
        self._num_served = [0] * config.num_replicas

    def run(self) -> FleetRun:
        infinite, num_shareable = InfiniteCache(), 0
        for number, request in enumerate(self._requests):
            if not self._fits(request):
                self._count_ended()
                continue
            if self._free_at is not None:
                request = self._requests[number] = request._replace(at_s=self._await_client(self._free_at))
            num_shareable += infinite.take(request, self._config.profile.block_size)
            arrives_at = request.at_s + self._config.profile.request_s
            self._advance(arrives_at)
            self._route(number, request, arrives_at)
        self._advance(math.inf)
        for replica in self._replicas:
            replica.check()
        wait_s, ttft_s, e2e_s, itl_p99_s = self._times
        totals = tuple(
            ReplicaTotals(self._num_served[each.number], each.busy_s, each.num_steps, each.num_computed_tokens)
            for each in self._replicas
        )
        return FleetRun(
            self._config,
            self._router.name,
            self._requests,
            self._replica,
            wait_s,
            ttft_s,
            e2e_s,
            itl_p99_s,
            self._num_cached,
            num_shareable,
            self._gaps,
            totals,
            self._end_s,
        )

    def _fits(self, request: TracedRequest) -> bool:
        """Return whether a replica can ever hold the request, as an engine checks at submit."""
        profile = self._config.profile
        num_tokens = request.num_prompt + (request.max_tokens or request.num_output)
        return num_tokens <= min(profile.max_model_len, profile.num_blocks * profile.block_size)

    def _await_client(self, free_at: deque[float]) -> float:
        """Let steps end until a client is free. Returns since when it is."""
        while not free_at:
            self._advance_one()
        return free_at.popleft()

    def _advance(self, until: float) -> None:
        """Let all steps end that end before `until`."""
        while self._due and self._due[0][0] <= until:
            self._advance_one()

    def _advance_one(self) -> None:
        at, number = heapq.heappop(self._due)
        replica = self._replicas[number]
        if replica.ends_at == at:  # else a request has ended its steps earlier
            replica.finish_step()
            self._note(replica, at)

    def _note(self, replica: SimulatedReplica, now: float) -> None:
        """Take in that a replica's state has changed."""
        self._views[replica.number] = None
        if replica.ends_at != math.inf:
            heapq.heappush(self._due, (replica.ends_at, replica.number))
        stored, removed = replica.take_changes()
        if stored or removed:
            self._router.note_changes(replica.number, stored, removed)
        if self._config.profile.slowdown:
            self._slow_down(now)

    def _slow_down(self, now: float) -> None:
        """Tell all replicas how many others take their cores."""
        num_busy = sum(each.ends_at != math.inf for each in self._replicas)
        for each in self._replicas:
            planned = each.ends_at
            each.note_others(num_busy - (planned != math.inf), now)
            if each.ends_at != planned:
                heapq.heappush(self._due, (each.ends_at, each.number))

    def _route(self, number: int, request: TracedRequest, now: float) -> None:
        hashes = block_hashes(request, number, self._config.profile.block_size)
        views = [view or self._view(place) for place, view in enumerate(self._views)]
        replica = self._replicas[self._router.choose(number, request, hashes, views, now)]
        self._replica[number] = replica.number
        self._num_served[replica.number] += 1
        sequence = TracedSequence(number, request, hashes, self._info, now)
        replica.submit(sequence, now)
        self._note(replica, now)

    def _view(self, place: int) -> ReplicaView:
        view = self._views[place] = self._replicas[place].view()
        return view

    def _end(self, replica: SimulatedReplica, sequence: TracedSequence) -> None:
        number, gaps = sequence.stream_id, self._gaps
        request = self._requests[number]
        at_s = request.at_s
        itl_p99_s = gaps.add(sequence.gaps, sequence.gap_counts)
        self._times[:, number] = (
            sequence.admitted_at - at_s,
            sequence.first_token_at - at_s,
            sequence.last_token_at - at_s,
            itl_p99_s,
        )
        self._num_cached[number] = sequence.num_cached_tokens
        self._end_s = max(self._end_s, sequence.last_token_at)
        self._router.note_end(number)
        if self._free_at is not None:
            self._free_at.append(sequence.last_token_at)
        self._count_ended()

    def _count_ended(self) -> None:
        self._num_ended += 1
        if self._report is not None and self._num_ended % REPORT_EVERY == 0:
            self._report(self._num_ended)
