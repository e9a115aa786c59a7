"""The C++ classes that requests to the LLM class carry."""

import datetime
from dataclasses import dataclass, field
from enum import IntEnum


class FinishReason(IntEnum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class KvCacheTransferMode(IntEnum):
    DRAM = 0
    GDS = 1
    POSIX_DEBUG_FALLBACK = 2


@dataclass
class LookaheadDecodingConfig:
    max_window_size: int = 4
    max_ngram_size: int = 3
    max_verification_set_size: int = 4


@dataclass
class TokenRangeRetentionConfig:
    token_start: int
    token_end: int | None
    priority: int
    duration_ms: datetime.timedelta | None = None


@dataclass
class KvCacheRetentionConfig:
    """Priorities are 0 to 100. Raises ValueError for others."""

    token_range_retention_configs: list[TokenRangeRetentionConfig]
    decode_retention_priority: int = 35
    decode_duration_ms: datetime.timedelta | None = None
    transfer_mode: KvCacheTransferMode = KvCacheTransferMode.DRAM
    directory: str | None = None

    def __post_init__(self) -> None:
        for priority in (
            self.decode_retention_priority,
            *(each.priority for each in self.token_range_retention_configs),
        ):
            if not 0 <= priority <= 100:
                raise ValueError(f"priority must be from 0 to 100, got {priority}")


KvCacheRetentionConfig.TokenRangeRetentionConfig = TokenRangeRetentionConfig  # type: ignore[attr-defined]


@dataclass
class TimingMetrics:
    arrival_time: datetime.timedelta = datetime.timedelta()
    first_scheduled_time: datetime.timedelta = datetime.timedelta()
    first_token_time: datetime.timedelta = datetime.timedelta()
    last_token_time: datetime.timedelta = datetime.timedelta()
    kv_cache_transfer_start: datetime.timedelta = datetime.timedelta()
    kv_cache_transfer_end: datetime.timedelta = datetime.timedelta()
    kv_cache_size: int = 0


@dataclass
class KvCacheMetrics:
    num_total_allocated_blocks: int = 0
    num_new_allocated_blocks: int = 0
    num_reused_blocks: int = 0
    num_missed_blocks: int = 0
    kv_cache_hit_rate: float = 0.0


@dataclass
class SpeculativeDecodingMetrics:
    acceptance_rate: float = 0.0
    total_accepted_draft_tokens: int = 0
    total_draft_tokens: int = 0


@dataclass
class RequestPerfMetrics:
    timing_metrics: TimingMetrics = field(default_factory=TimingMetrics)
    kv_cache_metrics: KvCacheMetrics = field(default_factory=KvCacheMetrics)
    speculative_decoding: SpeculativeDecodingMetrics = field(default_factory=SpeculativeDecodingMetrics)
    first_iter: int | None = None
    last_iter: int | None = None
    iter: int | None = None
