"""Who may hold KV blocks in the next iteration: the capacity scheduler, for one window size and no drafts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum


class Stage(Enum):
    """How far a request is."""

    FIRST_CHUNK = "first_chunk"
    LATER_CHUNK = "later_chunk"
    GENERATION = "generation"


@dataclass(slots=True)
class Load:
    """What the scheduler knows of a request: `num_prompt` is P, `max_new_tokens` is N."""

    request_id: int
    num_prompt: int
    max_new_tokens: int
    beam_width: int = 1
    num_prefilled: int = 0
    num_generated: int = 0
    held_per_beam: int = 0
    """Blocks that each beam holds now, those that it shares with the others included."""
    adapter: int | None = None
    adapter_pages: int = 0
    first_block: int | None = None
    """What its first block that is not cached will hold, where that can be reused."""

    @property
    def stage(self) -> Stage:
        if self.num_prefilled >= self.num_prompt:
            return Stage.GENERATION
        return Stage.LATER_CHUNK if self.held_per_beam else Stage.FIRST_CHUNK

    @property
    def num_tokens(self) -> int:
        """Of the context."""
        return self.num_prompt + self.num_generated


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache as it is before the iteration."""

    free_blocks: int
    tokens_per_block: int
    free_adapter_pages: int = 2**31


@dataclass(frozen=True, slots=True)
class Fitting:
    """Who may run, in order of arrival, and who loses its cache."""

    scheduled: tuple[Load, ...]
    paused: tuple[Load, ...] = ()


CapacityScheduler = Callable[[Sequence[Load], Cache, int], Fitting]
"""(active in order of arrival, cache, most requests) -> who fits."""


def held_blocks(load: Load, tokens_per_block: int) -> int:
    """Blocks of all beams: whole blocks of the prompt are shared."""
    shared = min(load.num_prompt // tokens_per_block, load.held_per_beam)
    return shared + (load.held_per_beam - shared) * load.beam_width


def remaining_blocks(load: Load, tokens_per_block: int) -> int:
    """Blocks to completion: what it may come to need beyond those held, reckoned with P + N tokens."""
    shared = load.num_prompt // tokens_per_block
    total = -(-(load.num_prompt + load.max_new_tokens) // tokens_per_block)
    if load.held_per_beam < shared:
        return shared - load.held_per_beam + (total - shared) * load.beam_width
    return (total - load.held_per_beam) * load.beam_width


def guaranteed_no_evict(active: Sequence[Load], cache: Cache, max_requests: int) -> Fitting:
    """Those under way always go on; others start in order while their worst case fits. Nobody is paused."""
    return _no_evict(active, cache, max_requests, is_static=False)


def static_batch(active: Sequence[Load], cache: Cache, max_requests: int) -> Fitting:
    """As above, but nobody starts while anybody generates."""
    return _no_evict(active, cache, max_requests, is_static=True)


def _no_evict(active: Sequence[Load], cache: Cache, max_requests: int, *, is_static: bool) -> Fitting:
    scheduled: list[Load] = []
    pending: list[Load] = []
    pages = _Pages(cache.free_adapter_pages)
    free = cache.free_blocks
    for load in active:
        if len(scheduled) >= max_requests:
            break
        if load.stage is Stage.GENERATION:
            scheduled.append(load)
            free -= remaining_blocks(load, cache.tokens_per_block)
            pages.claim(load)
        else:
            pending.append(load)
    if is_static and scheduled:
        return Fitting(tuple(scheduled))
    in_the_making = _in_the_making(pending)
    for load in pending:
        if not is_static and load.stage is Stage.FIRST_CHUNK and load.first_block is not None:
            if load.first_block in in_the_making:
                continue  # an iteration later it can reuse what another computes now
            in_the_making.add(load.first_block)
        if len(scheduled) >= max_requests:
            break
        needed = remaining_blocks(load, cache.tokens_per_block)
        if needed > free:
            break  # whoever comes later waits too
        if not pages.fits(load):
            continue
        scheduled.append(load)
        free -= needed
        pages.claim(load)
    return Fitting(tuple(scheduled))


class _Pages:
    """Pages of the adapters' cache; one adapter's are there once."""

    def __init__(self, free: int) -> None:
        self._free = free
        self._claimed: set[int] = set()

    def fits(self, load: Load) -> bool:
        return load.adapter is None or load.adapter in self._claimed or load.adapter_pages <= self._free

    def claim(self, load: Load) -> None:
        if load.adapter is not None and load.adapter not in self._claimed:
            self._claimed.add(load.adapter)
            self._free -= load.adapter_pages


def _in_the_making(pending: Sequence[Load]) -> set[int]:
    """Blocks that contexts under way are computing."""
    return {load.first_block for load in pending if load.stage is Stage.LATER_CHUNK and load.first_block is not None}


def max_utilization(active: Sequence[Load], cache: Cache, max_requests: int) -> Fitting:
    """Whoever fits for this one iteration; where blocks run out, the youngest that is under way is paused."""
    scheduled: list[Load] = []
    paused: list[Load] = []
    free = cache.free_blocks
    used, index, end = 0, 0, len(active)
    while index < end:
        load = active[index]
        needed = next_blocks(load, cache.tokens_per_block)
        if len(scheduled) < max_requests and used + needed <= free:
            scheduled.append(load)
            used += needed
            index += 1
            continue
        started = [i for i in range(index, end) if active[i].stage is not Stage.FIRST_CHUNK]
        if not started:
            break
        end = started[-1]
        paused.append(active[end])
        free += held_blocks(active[end], cache.tokens_per_block)
    return Fitting(tuple(scheduled), tuple(paused))


def next_blocks(load: Load, tokens_per_block: int) -> int:
    """Blocks that the next iteration allocates for it."""
    if load.stage is Stage.FIRST_CHUNK:
        shared = load.num_prompt // tokens_per_block
        return shared + (-(-load.num_prompt // tokens_per_block) - shared) * load.beam_width
    if load.stage is Stage.LATER_CHUNK:
        return 0
    needed = -(-load.num_tokens // tokens_per_block)
    return max(needed - load.held_per_beam, 0) * load.beam_width


POLICIES: dict[str, CapacityScheduler] = {
    "GUARANTEED_NO_EVICT": guaranteed_no_evict,
    "STATIC_BATCH": static_batch,
    "MAX_UTILIZATION": max_utilization,
}
