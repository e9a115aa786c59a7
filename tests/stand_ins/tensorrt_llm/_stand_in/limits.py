"""Reads a model folder, and derives the limits of an iteration from it and the arguments of an LLM."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .events import CacheEvents
from .kv_cache import KvCache
from .schedulers import BatchLimits
from .settings import settings
from .worker import WorkerLimits

_HOST_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """The facts of a model folder. `build` has the limits of a compiled engine."""

    path: Path
    vocab_size: int
    max_positions: int
    build: dict[str, Any] | None


def read_model_folder(path: Path, *, is_engine: bool) -> ModelFolder:
    """Raises what the real class raises as far as it is known: FileNotFoundError without config.json, ValueError for
    a compiled engine given to the class for PyTorch."""
    if not (path / "config.json").is_file():
        raise FileNotFoundError(f"{path}/config.json does not exist")
    told = json.loads((path / "config.json").read_text())
    has_engine = (path / "rank0.engine").is_file()
    if has_engine and not is_engine:
        raise ValueError(f"{path} holds a TensorRT engine, which the PyTorch backend cannot load")
    config = told.get("pretrained_config", told)
    text = config.get("text_config", config)
    positions = text.get("max_position_embeddings", 2048)
    return ModelFolder(path, text["vocab_size"], positions, told.get("build_config") if has_engine else None)


def load_as_told() -> None:
    """Load with the failure that a fault asks for."""
    if settings().claims("load_error"):
        raise RuntimeError(f"the model cannot be loaded: {settings().fault('load_error') or 'a fault was asked for'}")


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
    return WorkerLimits(
        batch=batch,
        policy=str(scheduler.capacity_scheduler_policy),
        num_blocks=-(-(kv.max_tokens or settings().kv_tokens) // size),
        tokens_per_block=size,
        has_stats=is_engine or args.enable_iter_perf_stats,
        by_priority=getattr(scheduler, "waiting_queue_policy", "fcfs") == "priority",
    )


def max_seq_len(args: Any, folder: ModelFolder) -> int:
    built = (folder.build or {}).get("max_seq_len")
    return int(built or args.max_seq_len or folder.max_positions)


def make_kv_cache(args: Any, limits: WorkerLimits, window: int) -> KvCache:
    kv = args.kv_cache_config
    published = getattr(kv, "kv_events_config", None)
    is_published = published is not None and published.enable_kv_cache_events and published.publisher != "null"
    events = CacheEvents(kv.event_buffer_max_size, window, published if is_published else None)
    return KvCache(
        limits.num_blocks,
        limits.tokens_per_block,
        reuses=kv.enable_block_reuse,
        events=events,
        num_host_blocks=(kv.host_cache_size or 0) // _HOST_BLOCK_BYTES,
    )
