"""TensorRT-LLM's KV-cache events: which blocks can be found again."""

from collections.abc import Mapping
from typing import Any

GPU_LEVEL = 0


class CachedBlocks:
    """Blocks in the GPU's cache that hold a prefix, by hash, for each rank of attention parallelism and each window."""

    def __init__(self) -> None:
        self._blocks: set[tuple[int, int, Any]] = set()

    def __len__(self) -> int:
        return len(self._blocks)

    def observe(self, event: Mapping[str, Any]) -> None:
        """Events of unknown kinds mean nothing here."""
        told = event.get("data")
        if not isinstance(told, Mapping):
            return
        where = (int(event.get("attention_dp_rank") or 0), int(event.get("window_size") or 0))
        match told.get("type"):
            case "stored":
                for block in told.get("blocks") or ():
                    self._place((*where, block.get("block_hash")), block.get("cache_level"))
            case "removed":
                self._blocks.difference_update((*where, block_hash) for block_hash in told.get("block_hashes") or ())
            case "updated":
                change = told.get("cache_level")
                if isinstance(change, Mapping):
                    self._place((*where, told.get("block_hash")), change.get("new_value"))

    def _place(self, key: tuple[int, int, Any], level: Any) -> None:
        if level in (None, GPU_LEVEL):
            self._blocks.add(key)
        else:  # in host memory, or on a disk
            self._blocks.discard(key)
