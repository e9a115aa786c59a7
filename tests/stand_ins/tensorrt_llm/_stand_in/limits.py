"""From the arguments of an LLM and its model folder to what an iteration may take."""

from typing import Any

from .micro_batch import BatchLimits
from .model_folder import ModelFolder
from .reuse import Reuse
from .settings import settings
from .worker import WorkerLimits


def worker_limits(args: Any, folder: ModelFolder, *, is_engine: bool) -> WorkerLimits:
    build = folder.build or {}
    kv = args.kv_cache_config
    size = kv.tokens_per_block
    scheduler = args.scheduler_config
    unit = size if args.enable_chunked_prefill else None
    batch = BatchLimits(
        max_batch_size=min(args.max_batch_size or 2048, build.get("max_batch_size", 2**31)),
        max_num_tokens=min(args.max_num_tokens or 8192, build.get("max_num_tokens", 2**31)),
        chunk_unit=unit,
        is_fair=scheduler.context_chunking_policy == "EQUAL_PROGRESS",
    )
    has_request_stats = bool(getattr(args, "enable_iter_req_stats", False))
    return WorkerLimits(
        batch=batch,
        policy=str(scheduler.capacity_scheduler_policy),
        num_blocks=-(-(kv.max_tokens or settings().kv_tokens) // size),
        tokens_per_block=size,
        has_stats=is_engine or args.enable_iter_perf_stats,
        has_request_stats=has_request_stats,
    )


def max_seq_len(args: Any, folder: ModelFolder) -> int:
    built = (folder.build or {}).get("max_seq_len")
    return int(built or args.max_seq_len or folder.max_positions)


def make_reuse(args: Any, limits: WorkerLimits, window: int) -> Reuse:
    kv = args.kv_cache_config
    return Reuse(
        limits.num_blocks,
        limits.tokens_per_block,
        kv.event_buffer_max_size,
        window,
        is_on=kv.enable_block_reuse,
    )
