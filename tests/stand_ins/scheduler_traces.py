"""Workloads for TensorRT-LLM's schedulers, and their traces iteration by iteration.

`python -m tests.stand_ins.scheduler_traces FILE` writes the traces of the stand-in's schedulers to FILE.
"""

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from tests.stand_ins.tensorrt_llm._stand_in.kv_cache import KvCache, Prefix
from tests.stand_ins.tensorrt_llm._stand_in.schedulers import (
    POLICIES,
    BatchLimits,
    Cache,
    Load,
    Stage,
    micro_batch,
)

Chunks = tuple[tuple[int, int], ...]


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A request that ends after `num_output` of the `max_tokens` that are reserved for it, or is cancelled."""

    request_id: int
    arrival: int
    """The step at which it arrives."""
    num_prompt: int
    max_tokens: int
    num_output: int
    cancelled_at: int | None = None
    family: int = 0
    num_alike: int = 0
    """Its first tokens, which all prompts of its family begin with."""

    @property
    def token_ids(self) -> list[int]:
        """The prompt: no two requests have a token in common but in what is alike."""
        return [-1 - self.family] * self.num_alike + [self.request_id] * (self.num_prompt - self.num_alike)


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Requests, and the limits that they meet. `chunking` is a ContextChunkingPolicy, "" for none; with `reuses` they
    share blocks, and with `has_credit` those of others are not reserved for one that is to begin."""

    name: str
    policy: str = "GUARANTEED_NO_EVICT"
    max_batch_size: int = 8
    max_num_tokens: int = 256
    tokens_per_block: int = 32
    num_blocks: int = 64
    chunking: str = ""
    requests: list[Request] = []
    max_steps: int = 2000
    reuses: bool = False
    has_credit: bool = False


class Step(msgspec.Struct, frozen=True, array_like=True):
    """A step by request ids: those that fit, in the scheduler's order; contexts with the tokens that run; those that
    generate; those that lose their cache."""

    fitting: tuple[int, ...]
    contexts: Chunks
    generations: tuple[int, ...]
    paused: tuple[int, ...] = ()


class Trace(msgspec.Struct, frozen=True):
    workload: Workload
    steps: list[Step]


@dataclass(slots=True)
class Simulation:
    """The state that a workload's steps change: what is held, computed and generated."""

    workload: Workload
    number: int = 0
    active: dict[int, Load] = field(default_factory=dict)
    """Active requests, in order of arrival."""
    prefixes: dict[int, Prefix] = field(default_factory=dict)
    """What the cache has of those that have not begun."""
    finished_at: dict[int, int] = field(default_factory=dict)
    kv_cache: KvCache = field(init=False)
    _outputs: dict[int, int] = field(default_factory=dict)
    _requests: dict[int, Request] = field(default_factory=dict)
    contexts: dict[int, list[int]] = field(default_factory=dict)
    """The tokens that each request computes before it generates."""

    def __post_init__(self) -> None:
        workload = self.workload
        self.kv_cache = KvCache(workload.num_blocks, workload.tokens_per_block, reuses=workload.reuses)

    @property
    def is_over(self) -> bool:
        is_done = len(self.finished_at) == len(self.workload.requests)
        return is_done or self.number >= self.workload.max_steps

    @property
    def num_free_blocks(self) -> int:
        return self.kv_cache.num_free

    def begin(self) -> None:
        """Add the requests that arrive, remove those that are cancelled, and look at the cache."""
        for request in self.workload.requests:
            if request.arrival == self.number:
                self.hand_over(request)
        self.cancel()
        self.look_up()

    def hand_over(self, request: Request) -> None:
        """Make a request active."""
        request_id = request.request_id
        self._requests[request_id], self.contexts[request_id] = request, request.token_ids
        self._outputs[request_id] = 0
        self.active[request_id] = Load(request_id, request.num_prompt, request.max_tokens)

    def cancel(self) -> None:
        """Remove the active requests that are cancelled now."""
        for request in [self._requests[request_id] for request_id in self.active]:
            if request.cancelled_at == self.number:
                self._end(request.request_id)

    def look_up(self) -> None:
        """Look up what the cache has of each request, before the step."""
        for request_id, load in self.active.items():
            load.num_private = self.kv_cache.num_private(request_id)
            if load.stage is Stage.FIRST_CHUNK:
                self.prefixes[request_id] = self.kv_cache.find(self.contexts[request_id], 0)
                load.take_prefix(self.prefixes[request_id], self.workload.tokens_per_block)

    def apply(self, step: Step) -> None:
        """Apply the changes that running a step makes."""
        size = self.workload.tokens_per_block
        for request_id in step.paused:
            load = self.active[request_id]
            self.kv_cache.release(request_id)
            self.contexts[request_id] += [request_id] * load.num_generated
            self.active[request_id] = Load(request_id, load.num_tokens, load.max_new_tokens - load.num_generated)
        first_chunks = [self.active[i] for i, _ in step.contexts if self.active[i].stage is Stage.FIRST_CHUNK]
        for load in first_chunks:
            self.kv_cache.share(load.request_id, self.prefixes[load.request_id])
        for load in first_chunks:
            self.kv_cache.begin(load.request_id, load.num_prompt)
            load.held_per_beam = -(-load.num_prompt // size)
        for request_id in step.generations:
            load = self.active[request_id]
            needed = max(load.held_per_beam, -(-load.num_tokens // size))
            self.kv_cache.grow(request_id, needed - load.held_per_beam)
            load.held_per_beam = needed
        for request_id, count in step.contexts:
            load = self.active[request_id]
            load.num_prefilled += count
            if load.num_prefilled == load.num_prompt:
                self.kv_cache.store(request_id, self.contexts[request_id], 0)
                self._generate(load)
        for request_id in step.generations:
            self._generate(self.active[request_id])
        self.number += 1

    def _generate(self, load: Load) -> None:
        load.num_generated += 1
        self._outputs[load.request_id] += 1
        if self._outputs[load.request_id] >= self._requests[load.request_id].num_output:
            self._end(load.request_id)

    def _end(self, request_id: int) -> None:
        del self.active[request_id]
        self.kv_cache.release(request_id)
        self.finished_at[request_id] = self.number


Scheduler = Callable[[Workload, Sequence[Load], int], Step]
"""(workload, active in order of arrival, free blocks) -> what the next iteration does."""


def run(workload: Workload, schedule: Scheduler) -> Trace:
    """Run every iteration until all requests are finished, or `max_steps`."""
    simulation = Simulation(workload)
    steps = []
    while not simulation.is_over:
        simulation.begin()
        steps.append(schedule(workload, list(simulation.active.values()), simulation.num_free_blocks))
        simulation.apply(steps[-1])
    return Trace(workload, steps)


def schedule_as_stand_in(workload: Workload, active: Sequence[Load], num_free_blocks: int) -> Step:
    cache = Cache(num_free_blocks, workload.tokens_per_block, has_credit=workload.has_credit)
    fitting = POLICIES[workload.policy](active, cache, workload.max_batch_size)
    unit = workload.tokens_per_block if workload.chunking else None
    limits = BatchLimits(
        workload.max_batch_size, workload.max_num_tokens, unit, is_fair=workload.chunking == "EQUAL_PROGRESS"
    )
    batch = micro_batch(fitting.scheduled, limits)
    return Step(
        fitting=tuple(load.request_id for load in fitting.scheduled),
        contexts=tuple((load.request_id, count) for load, count in batch.contexts),
        generations=tuple(load.request_id for load in batch.generations),
        paused=tuple(load.request_id for load in fitting.paused),
    )


def workloads() -> list[Workload]:
    """Return the workloads that the traces are of."""
    mixed = _arrivals(40, seed=1, spread=30, prompts=(4, 200), tokens=(2, 60))
    crowd = _arrivals(150, seed=2, spread=120, prompts=(2, 120), tokens=(1, 40))
    long = _arrivals(24, seed=3, spread=40, prompts=(100, 900), tokens=(4, 50))
    short = _arrivals(60, seed=4, spread=20, prompts=(2, 30), tokens=(1, 30))
    return [
        Workload(name="roomy", num_blocks=400, max_num_tokens=4096, max_batch_size=64, requests=mixed),
        Workload(name="tight_cache", num_blocks=9, max_num_tokens=4096, requests=mixed),
        Workload(name="head_of_line", num_blocks=16, max_num_tokens=4096, requests=_head_of_line()),
        Workload(name="never_fits", num_blocks=16, max_num_tokens=4096, requests=_never_fits(), max_steps=120),
        Workload(name="few_places", num_blocks=300, max_num_tokens=4096, max_batch_size=3, requests=short),
        Workload(name="early_ends", num_blocks=14, max_num_tokens=4096, requests=_early_ends(mixed)),
        Workload(name="cancelled", num_blocks=14, max_num_tokens=4096, requests=_cancelled(mixed)),
        Workload(name="crowd", num_blocks=40, max_num_tokens=4096, max_batch_size=16, requests=crowd),
        Workload(name="token_budget", num_blocks=80, max_num_tokens=220, max_batch_size=16, requests=mixed),
        Workload(name="chunks", num_blocks=100, chunking="FIRST_COME_FIRST_SERVED", requests=long),
        Workload(
            name="chunks_tight", num_blocks=32, max_num_tokens=100, chunking="FIRST_COME_FIRST_SERVED", requests=long
        ),
        Workload(name="chunks_crowd", num_blocks=60, max_num_tokens=64, chunking="FIRST_COME_FIRST_SERVED",
                 max_batch_size=16, requests=crowd),
        Workload(name="fair_chunks", num_blocks=100, chunking="EQUAL_PROGRESS", requests=long),
        Workload(name="static_batch", policy="STATIC_BATCH", num_blocks=40, max_num_tokens=4096, requests=mixed),
        Workload(name="max_utilization", policy="MAX_UTILIZATION", num_blocks=9, max_num_tokens=4096, requests=mixed),
    ]  # fmt: skip


def _arrivals(
    count: int, *, seed: int, spread: int, prompts: tuple[int, int], tokens: tuple[int, int]
) -> list[Request]:
    chosen = random.Random(seed)
    arrivals = sorted(chosen.randrange(spread) for _ in range(count))
    sizes = [(chosen.randint(*prompts), chosen.randint(*tokens)) for _ in arrivals]
    return [
        Request(number, arrival, num_prompt, max_tokens, max_tokens)
        for number, (arrival, (num_prompt, max_tokens)) in enumerate(zip(arrivals, sizes, strict=True))
    ]


def _head_of_line() -> list[Request]:
    """A large one that must wait for the first holds up small ones that would fit."""
    large = [Request(0, 0, 200, 40, 40), Request(1, 1, 300, 90, 90)]
    return large + [Request(number, 2, 10, 10, 10) for number in range(2, 8)]


def _never_fits() -> list[Request]:
    """One needs more than the whole cache: it never starts, nor does anybody behind it."""
    before = [Request(number, 0, 30, 20, 20) for number in range(3)]
    return [*before, Request(3, 1, 400, 200, 200), *(Request(number, 2, 10, 5, 5) for number in range(4, 7))]


def _early_ends(requests: list[Request]) -> list[Request]:
    """Make requests that release their reservation long before they have used it."""
    return [
        Request(each.request_id, each.arrival, each.num_prompt, each.max_tokens * 3, max(each.max_tokens // 2, 1))
        for each in requests
    ]


def _cancelled(requests: list[Request]) -> list[Request]:
    """Cancel every third request, some of them before they start."""
    return [
        msgspec.structs.replace(each, cancelled_at=each.arrival + 1 + each.request_id % 17)
        if each.request_id % 3 == 0
        else each
        for each in requests
    ]


def main(path: Path) -> None:
    traces = [run(workload, schedule_as_stand_in) for workload in workloads()]
    path.write_bytes(b"[\n" + b",\n".join(msgspec.json.encode(trace) for trace in traces) + b"\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
