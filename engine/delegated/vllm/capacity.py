"""How many blocks a request of vLLM can ever hold, so that nothing that was admitted is ever preempted.

The rules are those of vLLM's `kv_cache_interface.py`: its scheduler admits by the prompt alone, and preempts where
answers outgrow the cache.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.engine.blocks import blocks_for
from sluice.engine.delegated.admission import BlockSharing

log = logging.getLogger(__name__)

_FULL = frozenset({"full_attention", "mla_attention"})
_WINDOWED = frozenset({"sliding_window", "sliding_window_mla"})


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share their blocks. `window` is the tokens that they look back, 0 for all."""

    block_size: int
    window: int = 0

    def most_blocks(self, num_tokens: int, num_in_flight: int) -> int:
        """Return the blocks that a sequence of `num_tokens` holds at most, of which `num_in_flight` may be scheduled
        ahead."""
        whole = blocks_for(num_tokens, self.block_size)
        if not self.window:
            return whole
        # A window begins inside a block, which it then needs with all others.
        return min(whole, blocks_for(self.window - 1 + num_in_flight, self.block_size) + 1)


@dataclass(frozen=True, slots=True)
class CacheCapacity:
    """The KV cache that vLLM tells of."""

    groups: tuple[CacheGroup, ...]
    num_blocks: int
    """Blocks that requests can use; 0 for an encoder, which keeps nothing."""
    max_model_len: int
    num_in_flight: int
    """Most tokens that are scheduled and not yet settled."""
    num_lookahead: int
    """Draft tokens that a step may write beyond the sequence."""
    sharing: BlockSharing = BlockSharing.NONE
    """Which blocks of the prompts in flight are surely there once."""

    def worst_case_blocks(self, num_prompt: int, max_tokens: int) -> int:
        """Return the most blocks that a request can hold. The last token is never written."""
        num_tokens = min(num_prompt + max_tokens - 1 + self.num_lookahead, self.max_model_len)
        return sum(group.most_blocks(num_tokens, self.num_in_flight) for group in self.groups)


def read_capacity(vllm_config: Any, metadata: Sequence[Mapping[str, Any]]) -> CacheCapacity:
    """Return the capacity of a started engine. `metadata` is what `get_kv_cache_group_metadata` returns. Groups of
    unknown kinds, such as Mamba's, count as if they kept all tokens, which is more than they take."""
    cache = vllm_config.cache_config
    groups = []
    for each in metadata:
        kind, window = str(each.get("kind")), each.get("sliding_window")
        block_size = int(each.get("block_size") or cache.block_size)
        groups.append(CacheGroup(block_size, int(window) if kind in _WINDOWED and window else 0))
        if kind not in _FULL | _WINDOWED:
            log.warning(
                "layers of kind %s are reserved for as if they kept all tokens, which is more than needed", kind
            )
    return CacheCapacity(
        tuple(groups),
        max(int(cache.num_gpu_blocks) - 1, 1) if groups else 0,  # vLLM keeps one to itself
        int(vllm_config.model_config.max_model_len),
        int(getattr(vllm_config, "max_in_flight_tokens", vllm_config.scheduler_config.max_num_batched_tokens)),
        _num_lookahead(vllm_config),
        _read_sharing(vllm_config, metadata),
    )


def _read_sharing(vllm_config: Any, metadata: Sequence[Mapping[str, Any]]) -> BlockSharing:
    """Nothing is sure of windows, which give blocks back while others count on them, of several groups, which share
    what all of them have, of drafts, for which the last block is dropped, of blocks that a connector brings, and of
    data-parallel ranks, whose caches are their own.

    Prompts run one after the other, each to its end, and blocks can be found before they are computed: so no two
    compute the same one, unless long prompts have a limit of their own and run side by side.
    """
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    ranks = ("data_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size")
    has_one_cache = (
        bool(cache.enable_prefix_caching)
        and len(metadata) == 1
        and str(metadata[0].get("kind")) in _FULL
        and not getattr(vllm_config, "speculative_config", None)
        and not getattr(vllm_config, "kv_transfer_config", None)
        and all(int(getattr(parallel, name, 1) or 1) == 1 for name in ranks)
    )
    if not has_one_cache:
        return BlockSharing.NONE
    scheduler = vllm_config.scheduler_config
    is_in_turn = scheduler.policy == "fcfs" and not scheduler.long_prefill_token_threshold
    return BlockSharing.AWAITED if is_in_turn else BlockSharing.COMPUTED


def _num_lookahead(vllm_config: Any) -> int:
    speculation = getattr(vllm_config, "speculative_config", None)
    num_drafts = int(getattr(speculation, "num_speculative_tokens", 0) or 0)
    return num_drafts + int(getattr(vllm_config, "num_lookahead_tokens", 0) or 0)
