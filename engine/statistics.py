"""The statistics of an engine, as its frames bring them up: frozen msgspec structs, with packed histograms of its steps
and of the waits and prefills of its sequences. They are added over engines that follow each other, and over those that
serve together.

Histograms are packed as one array of float64: a frame with 600 bytes more costs less than one with a list of numbers,
and the arrays of several engines are added element by element.
"""

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING

import msgspec

from sluice.record.histogram import Histogram

if TYPE_CHECKING:
    import numpy as np


class IterationStats(msgspec.Struct, frozen=True, array_like=True):
    """A delegated runtime's statistics of its last iteration, under our names; None for those it does not report."""

    iteration: int
    latency_ms: float
    timestamp_us: int | None = None
    """Microseconds since 1970."""
    num_active: int | None = None
    max_active: int | None = None
    num_scheduled: int | None = None
    num_context: int | None = None
    num_generation: int | None = None
    num_paused: int | None = None
    num_queued: int | None = None
    context_tokens: int | None = None
    micro_batch_id: int | None = None
    gpu_memory_bytes: int | None = None
    cpu_memory_bytes: int | None = None
    pinned_memory_bytes: int | None = None
    max_blocks: int | None = None
    free_blocks: int | None = None
    used_blocks: int | None = None
    tokens_per_block: int | None = None
    reused_blocks: int | None = None
    missed_blocks: int | None = None
    cache_hit_rate: float | None = None
    """From 0 to 1."""
    acceptance_length: float | None = None
    """Tokens that a step brings with speculation, on average."""


class KvTierStats(msgspec.Struct, frozen=True, array_like=True):
    """The blocks outside of the KV cache, in host memory and on disk."""

    host_blocks: int = 0
    host_capacity: int = 0
    host_stored_total: int = 0
    """Blocks copied from the KV cache."""
    host_lost_total: int = 0
    """Blocks that the KV cache gave up and that no step had time to copy, or that are computed faster than copied."""
    host_hits_total: int = 0
    """Blocks that came back and were in memory."""
    disk_blocks: int = 0
    disk_capacity: int = 0
    disk_stored_total: int = 0
    disk_lost_total: int = 0
    """Blocks that the host tier gave up while the disk had too many to write."""
    disk_hits_total: int = 0
    """Blocks that came back and were on the disk alone."""
    disk_damaged_total: int = 0
    """Blocks whose content on the disk was not what had been written."""
    is_disk_off: bool = False
    """Whether an error has turned the disk tier off."""
    restored_tokens_total: int = 0
    restore_seconds_total: float = 0.0
    """Tokens whose blocks came back, and the time that steps waited for the copies."""
    slower_total: int = 0
    late_total: int = 0
    """Requests whose prefix was left where it was, because computing it was expected to be faster; because it had taken
    too long to come back."""


class HandoverStats(msgspec.Struct, frozen=True, array_like=True):
    """The blocks that an engine has handed to others, and those that it got from others."""

    sent_blocks_total: int = 0
    sent_bytes_total: int = 0
    send_seconds_total: float = 0.0
    """Time that steps waited for the copies of what was sent."""
    received_blocks_total: int = 0
    received_bytes_total: int = 0
    receive_seconds_total: float = 0.0
    """Time from asking for blocks until the last of them was there, summed over the times that some were asked for."""
    missing_blocks_total: int = 0
    """Blocks that the other engine no longer had."""
    failed_total: int = 0
    """Times that an engine was asked for blocks and refused, or did not answer in time."""
    late_total: int = 0
    """Prompts that were computed after all, because their blocks had not come in time."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """The engine's state after a step. Counters (`*_total`) only grow; times are seconds."""

    num_running: int
    num_waiting: int
    num_blocks_used: int
    num_blocks_free: int
    num_blocks_reserved: int
    steps_total: int
    runner_seconds_total: float
    overhead_seconds_total: float
    prompt_tokens_total: int
    generation_tokens_total: int
    num_blocks_cached: int = 0
    """Free blocks whose content a request could still reuse as a prefix."""
    num_tokens_waiting: int = 0
    """Prompt tokens of the waiting requests."""
    cached_tokens_total: int = 0
    """Prompt tokens that were found in the prefix cache instead of computed."""
    preemptions_total: int = 0
    recomputed_tokens_total: int = 0
    """Tokens computed again after a preemption. Both counters stay 0 under guaranteed_no_evict."""
    draft_tokens_total: int = 0
    accepted_tokens_total: int = 0
    """Draft tokens that speculation proposed, and how many of them the model accepted."""
    timeouts_total: int = 0
    predicted_wait_s: float = 0.0
    """Predicted wait of a request submitted now."""
    waits_total: int = 0
    wait_seconds_total: float = 0.0
    wait_error_seconds_total: float = 0.0
    """Requests admitted, the sum of their waits, and the sum of the absolute errors of the predictions at submit."""
    iteration: IterationStats | None = None
    """A delegated runtime's own statistics; None for our executor, and before there are any."""
    num_foreground_waiting: int = 0
    """Requests of priorities before `BACKGROUND_PRIORITY` for which the last step had no room."""
    prefill_tokens_per_s: float = 0.0
    """Tokens of prompts that the engine computes in a second beside what runs; 0 before it has learned that."""
    decode_step_s: float = 0.0
    """Seconds of a step in which what runs decodes; 0 before it has learned that."""
    is_draining: bool = False
    """Whether the engine takes no new requests, because it is about to end."""
    kv_tiers: KvTierStats | None = None
    """None for an engine without KV tiers."""
    handover: HandoverStats | None = None
    """None for an engine that has neither sent blocks to another one nor got any."""
    histograms: bytes = b""
    """Distributions since the engine's start, packed by `sluice.engine.statistics`; empty before there are any."""


_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BOUNDS = {
    "step_seconds": _SECONDS,
    "step_sequences": _SEQUENCES,
    "step_tokens": _TOKENS,
    "queue_seconds": _WAIT_SECONDS,
    "prefill_seconds": _WAIT_SECONDS,
}
"""Bounds by name, in the order of the packed form: of each histogram its counts, and then the sum of its values."""
_SIZE = sum(len(bounds) + 2 for bounds in BOUNDS.values())


class EngineHistograms:
    """The histograms of one engine, in the order of BOUNDS. Their counts lie in the packed form: frames are many."""

    def __init__(self) -> None:
        self.all: list[Histogram] = []
        self._packed = bytearray(8 * _SIZE)
        self._numbers = memoryview(self._packed).cast("d")
        self._totals: list[tuple[int, Histogram]] = []
        end = 0
        for bounds in BOUNDS.values():
            start, end = end, end + len(bounds) + 2
            self.all.append(Histogram(bounds, self._numbers[start : end - 1]))
            self._totals.append((end - 1, self.all[-1]))

    def pack(self) -> bytes:
        """Return the packed form."""
        for place, histogram in self._totals:
            self._numbers[place] = histogram.total
        return bytes(self._packed)


def unpack(packed: bytes) -> dict[str, Histogram]:
    """Return packed histograms by name; all 0 where there are none, or where they are another version's."""
    numbers, end, found = _read(packed).tolist(), 0, {}
    for name, bounds in BOUNDS.items():
        start, end = end, end + len(bounds) + 2
        found[name] = Histogram(bounds, numbers[start : end - 1])
        found[name].total = numbers[end - 1]
    return found


def add_packed(one: bytes, other: bytes) -> bytes:
    """Return the sums of two packed forms."""
    if not one or not other:
        return one or other
    return (_read(one) + _read(other)).tobytes()


def _read(packed: bytes) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    import numpy as np  # a command line is read without it

    found = np.frombuffer(packed, np.float64)
    return found if len(found) == _SIZE else np.zeros(_SIZE)


NO_STATS = EngineStats(0, 0, 0, 0, 0, 0, 0.0, 0.0, 0, 0)

_PARTS = ("iteration", "kv_tiers", "handover", "histograms")
"""Fields that are statistics of their own."""
_COUNTERS = tuple(name for name in EngineStats.__struct_fields__ if name.endswith("_total"))
_GAUGES = tuple(n for n in EngineStats.__struct_fields__ if not n.endswith("_total") and n not in _PARTS)
_TIER_COUNTERS = tuple(name for name in KvTierStats.__struct_fields__ if name.endswith("_total"))
_SUMMED = tuple(n for n in _GAUGES if n not in ("predicted_wait_s", "prefill_tokens_per_s", "decode_step_s"))


def add_counters(before: EngineStats, now: EngineStats) -> EngineStats:
    """Return `now` with its counters continued from those of `before`, because exported counters must not decrease."""
    sums = {name: getattr(before, name) + getattr(now, name) for name in _COUNTERS}
    tiers = now.kv_tiers
    if tiers is not None and before.kv_tiers is not None:
        counted = {name: getattr(before.kv_tiers, name) + getattr(tiers, name) for name in _TIER_COUNTERS}
        tiers = msgspec.structs.replace(tiers, **counted)
    histograms = add_packed(before.histograms, now.histograms)
    handover = _sum_handovers((before, now))
    return msgspec.structs.replace(now, **sums, kv_tiers=tiers, handover=handover, histograms=histograms)


def without_gauges(stats: EngineStats) -> EngineStats:
    """Return the counters of a lost engine, with all gauges at 0."""
    tiers = stats.kv_tiers
    if tiers is not None:
        tiers = KvTierStats(**{name: getattr(tiers, name) for name in _TIER_COUNTERS})
    return msgspec.structs.replace(stats, **dict.fromkeys(_GAUGES, 0), iteration=None, kv_tiers=tiers)


def sum_stats(each: Iterable[EngineStats], predicted_wait_s: float) -> EngineStats:
    """Return the sums over engines that serve together, as those of one engine with that predicted wait."""
    found = list(each)
    sums = {name: sum(getattr(stats, name) for stats in found) for name in (*_SUMMED, *_COUNTERS)}
    histograms = reduce(add_packed, (stats.histograms for stats in found), b"")
    tiers, handover = _sum_tiers(found), _sum_handovers(found)
    return EngineStats(
        **sums, predicted_wait_s=predicted_wait_s, kv_tiers=tiers, handover=handover, histograms=histograms
    )


def _sum_handovers(found: Iterable[EngineStats]) -> HandoverStats | None:
    each = [stats.handover for stats in found if stats.handover is not None]
    if not each:
        return None
    return HandoverStats(**{name: sum(getattr(e, name) for e in each) for name in HandoverStats.__struct_fields__})


def _sum_tiers(found: Iterable[EngineStats]) -> KvTierStats | None:
    tiers = [stats.kv_tiers for stats in found if stats.kv_tiers is not None]
    if not tiers:
        return None
    sums = {name: sum(getattr(each, name) for each in tiers) for name in KvTierStats.__struct_fields__}
    return KvTierStats(**{**sums, "is_disk_off": any(each.is_disk_off for each in tiers)})
