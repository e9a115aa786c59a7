"""TensorRT-LLM's schedulers, for one window size and no drafts: the capacity scheduler decides which requests may hold
KV blocks in the next iteration, the micro-batch scheduler which of them run and how much of their contexts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from .kv_cache import Prefix


class Stage(Enum):
    """The progress of a request."""

    FIRST_CHUNK = "first_chunk"
    LATER_CHUNK = "later_chunk"
    GENERATION = "generation"


@dataclass(slots=True)
class Load:
    """A request as the schedulers see it: `num_prompt` is P, `max_new_tokens` is N."""

    request_id: int
    num_prompt: int
    max_new_tokens: int
    beam_width: int = 1
    num_prefilled: int = 0
    num_generated: int = 0
    held_per_beam: int = 0
    """Blocks that each beam holds now, those that it shares with others included."""
    num_private: int = 0
    """Blocks that would be free without it."""
    num_credited: int = 0
    """Blocks of its prefix that other requests hold, while it holds none itself."""
    adapter: int | None = None
    adapter_pages: int = 0
    first_block: int | None = None
    """The hash of its first block that is not cached, where that can be reused."""

    def take_prefix(self, prefix: Prefix, tokens_per_block: int) -> None:
        """Note what the cache holds of its context before it begins."""
        self.num_prefilled = len(prefix.blocks) * tokens_per_block
        self.num_credited, self.first_block = prefix.num_held, prefix.first_missing

    @property
    def stage(self) -> Stage:
        if self.num_prefilled >= self.num_prompt:
            return Stage.GENERATION
        return Stage.LATER_CHUNK if self.held_per_beam else Stage.FIRST_CHUNK

    @property
    def num_tokens(self) -> int:
        """Tokens of the context."""
        return self.num_prompt + self.num_generated


@dataclass(frozen=True, slots=True)
class Cache:
    """The KV cache as it is before the iteration."""

    free_blocks: int
    """Blocks that nobody holds; one that several requests share is held once."""
    tokens_per_block: int
    free_adapter_pages: int = 2**31
    has_credit: bool = False
    """Whether blocks that others hold are not reserved for a request that is to begin, as from 1.3 on."""


@dataclass(frozen=True, slots=True)
class Fitting:
    """The requests that may run, in order of arrival, and those that lose their cache."""

    scheduled: tuple[Load, ...]
    paused: tuple[Load, ...] = ()


CapacityScheduler = Callable[[Sequence[Load], Cache, int], Fitting]
"""Takes the active requests in order of arrival, the cache and the most requests; returns those that fit."""


def remaining_blocks(load: Load, tokens_per_block: int) -> int:
    """Return the blocks to completion: those that it may need beyond those held, reckoned with P + N tokens."""
    shared = load.num_prompt // tokens_per_block
    total = -(-(load.num_prompt + load.max_new_tokens) // tokens_per_block)
    if load.held_per_beam < shared:
        return shared - load.held_per_beam + (total - shared) * load.beam_width
    return (total - load.held_per_beam) * load.beam_width


def guaranteed_no_evict(active: Sequence[Load], cache: Cache, max_requests: int) -> Fitting:
    """Requests under way always go on; others start in order while their worst case fits. None is paused."""
    return _no_evict(active, cache, max_requests, is_static=False)


def static_batch(active: Sequence[Load], cache: Cache, max_requests: int) -> Fitting:
    """Requests start as under GUARANTEED_NO_EVICT, but none while another generates."""
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
        if cache.has_credit and load.stage is Stage.FIRST_CHUNK:
            needed -= load.num_credited
        if needed > free:
            break  # whoever comes later waits too
        if not pages.fits(load):
            continue
        scheduled.append(load)
        free -= needed
        pages.claim(load)
    return Fitting(tuple(scheduled))


class _Pages:
    """Pages of the adapter cache; those of one adapter are counted once."""

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
    """Return the blocks that contexts under way are computing."""
    return {load.first_block for load in pending if load.stage is Stage.LATER_CHUNK and load.first_block is not None}


def max_utilization(active: Sequence[Load], cache: Cache, max_requests: int) -> Fitting:
    """Requests run that fit for this one iteration; where blocks run out, the youngest one under way is paused."""
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
        free += active[end].num_private
    return Fitting(tuple(scheduled), tuple(paused))


def next_blocks(load: Load, tokens_per_block: int) -> int:
    """Return the blocks that the next iteration allocates for it."""
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


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of an iteration. `chunk_unit` is None where contexts run whole; `is_fair` is EQUAL_PROGRESS, else the
    chunks are first come, first served.
    """

    max_batch_size: int
    max_num_tokens: int
    chunk_unit: int | None = None
    is_fair: bool = False


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The requests that run: contexts with the tokens that each gets, and generations."""

    contexts: tuple[tuple[Load, int], ...]
    generations: tuple[Load, ...]


def micro_batch(fitting: Sequence[Load], limits: BatchLimits) -> MicroBatch:
    """Take contexts and generations in order of arrival until the batch or its tokens are full."""
    contexts: list[Load] = []
    generations: list[Load] = []
    num_tokens, beam_width = 0, 0
    for load in fitting:
        if load.stage is Stage.GENERATION:
            if beam_width not in (0, load.beam_width):
                continue  # one iteration has one beam width
            if num_tokens + load.beam_width > limits.max_num_tokens:
                break
            beam_width = load.beam_width
            num_tokens += load.beam_width
            generations.append(load)
        elif limits.chunk_unit is None:
            if num_tokens + _rest(load) > limits.max_num_tokens:
                break
            num_tokens += _rest(load)
            contexts.append(load)
        else:
            contexts.append(load)
        if len(contexts) + len(generations) >= limits.max_batch_size:
            break
    chunks = [_rest(load) for load in contexts]
    if limits.chunk_unit is not None:
        chunks = _divide(chunks, limits.max_num_tokens - num_tokens, limits.chunk_unit, is_fair=limits.is_fair)
    running = tuple((load, size) for load, size in zip(contexts, chunks, strict=True) if size)
    return MicroBatch(running, tuple(generations))


def _rest(load: Load) -> int:
    return load.num_prompt - load.num_prefilled


def _divide(rests: list[int], budget: int, unit: int, *, is_fair: bool) -> list[int]:
    if sum(rests) <= budget:
        return rests
    return _equal_progress(rests, budget, unit) if is_fair else _first_come(rests, budget, unit)


def _first_come(rests: list[int], budget: int, unit: int) -> list[int]:
    """Divide first come, first served. A chunk that is not the whole rest is whole units."""
    chunks = []
    for rest in rests:
        size = rest if rest <= budget else budget // unit * unit
        chunks.append(size)
        budget -= size
    return chunks


def _equal_progress(rests: list[int], budget: int, unit: int) -> list[int]:
    """Divide in rounds of a unit each, until the budget is used or no chunk can grow."""
    chunks = [0] * len(rests)
    has_grown = True
    while has_grown:
        has_grown = False
        for i, rest in enumerate(rests):
            more = min(unit, rest - chunks[i])
            if 0 < more <= budget:
                chunks[i] += more
                budget -= more
                has_grown = True
    return chunks
