"""The statistics of an engine, as its frames bring them up. They are frozen msgspec structs."""

import msgspec


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
    """Distributions since the engine's start, packed by `sluice.engine.histograms`; empty before there are any."""
