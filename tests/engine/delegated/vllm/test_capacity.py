"""The most blocks that a request of vLLM can hold."""

from types import SimpleNamespace
from typing import Any

import pytest

from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.vllm.capacity import CacheCapacity, CacheGroup, read_capacity


def capacity(*groups: CacheGroup, most: int = 1000, in_flight: int = 64, lookahead: int = 0) -> CacheCapacity:
    return CacheCapacity(groups, 100, most, in_flight, lookahead)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "blocks"), [(1, 1, 1), (16, 1, 1), (16, 2, 2), (10, 23, 2), (10, 24, 3), (990, 100, 63)]
)
def test_full_attention(prompt: int, max_tokens: int, blocks: int) -> None:
    assert capacity(CacheGroup(16)).worst_case_blocks(prompt, max_tokens) == blocks


def test_a_window_keeps_what_it_sees() -> None:
    windowed = capacity(CacheGroup(16, window=128))
    assert windowed.worst_case_blocks(20, 10) == 2
    assert windowed.worst_case_blocks(500, 400) == (127 + 64 + 15) // 16 + 1
    assert capacity(CacheGroup(16), CacheGroup(16, 128)).worst_case_blocks(500, 400) == 57 + 13


def test_drafts_need_room() -> None:
    assert capacity(CacheGroup(16), lookahead=4).worst_case_blocks(10, 4) == 2


def vllm_config(ranks: int = 1, policy: str = "fcfs", most_chunk: int = 0, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=51, block_size=16, enable_prefix_caching=True),
        parallel_config=SimpleNamespace(data_parallel_size=ranks),
        model_config=SimpleNamespace(max_model_len=512),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=256, policy=policy, long_prefill_token_threshold=most_chunk
        ),
        **more,
    )


def test_it_is_read_from_vllm() -> None:
    groups = [
        {"kind": "full_attention", "block_size": 32, "sliding_window": None},
        {"kind": "sliding_window", "block_size": 16, "sliding_window": 64},
        {"kind": "mamba", "block_size": 8, "sliding_window": None},
    ]
    drafts = SimpleNamespace(num_speculative_tokens=3)
    read = read_capacity(vllm_config(max_in_flight_tokens=128, speculative_config=drafts), groups)
    assert read == CacheCapacity((CacheGroup(32), CacheGroup(16, 64), CacheGroup(8)), 50, 512, 128, 3)
    encoder = read_capacity(vllm_config(), [])
    assert encoder == CacheCapacity((), 0, 512, 256, 0) and encoder.worst_case_blocks(500, 1) == 0


def test_blocks_are_shared_where_one_group_keeps_all_tokens_for_all_requests() -> None:
    full: dict[str, Any] = {"kind": "full_attention"}
    windowed: dict[str, Any] = {"kind": "sliding_window", "sliding_window": 64}
    assert read_capacity(vllm_config(), [full]).sharing is BlockSharing.AWAITED
    for side_by_side in (vllm_config(most_chunk=512), vllm_config(policy="priority")):
        assert read_capacity(side_by_side, [full]).sharing is BlockSharing.COMPUTED
    uncached = vllm_config()
    uncached.cache_config.enable_prefix_caching = False
    drafting = vllm_config(speculative_config=SimpleNamespace(num_speculative_tokens=3))
    for config, groups in (
        (vllm_config(), [windowed]),
        (vllm_config(), [{"kind": "mamba"}]),
        (vllm_config(), [full, windowed]),
        (vllm_config(ranks=2), [full]),
        (drafting, [full]),
        (vllm_config(kv_transfer_config=SimpleNamespace()), [full]),
        (uncached, [full]),
    ):
        assert read_capacity(config, groups).sharing is BlockSharing.NONE
