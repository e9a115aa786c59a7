"""The number of blocks, from the configuration and the free memory."""

import logging
from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.runners.cache_size import check_cache_limits, choose_num_blocks
from sluice.errors import ErrorCode, SluiceError

MIB, GIB = 1 << 20, 1 << 30


def blocks(free_bytes: int = 16 * GIB, block_bytes: int = MIB, max_model_len: int = 4096, **asked: Any) -> int:
    return choose_num_blocks(EngineConfig(model_path="", **asked), block_bytes, 32, max_model_len, free_bytes)


def test_what_is_asked_for_first_wins() -> None:
    asked: dict[str, Any] = {"num_blocks": 7, "kv_cache_memory_bytes": 100 * MIB, "kv_cache_memory_fraction": 0.5}
    assert blocks(**asked) == 7
    del asked["num_blocks"]
    assert blocks(**asked) == 100
    del asked["kv_cache_memory_bytes"]
    assert blocks(**asked) == 8 * 1024


@pytest.mark.parametrize(
    ("free_bytes", "max_model_len", "expected"),
    [
        (16 * GIB, 1024, 256),  # four full-length requests need 128 blocks: 256 MiB is more
        (16 * GIB, 4096, 512),  # four full-length requests
        (16 * GIB, 1 << 20, 8 * 1024),  # four would need 128 GiB: half of what is free
        (300 * MIB, 1024, 150),
    ],
)
def test_default(free_bytes: int, max_model_len: int, expected: int) -> None:
    assert blocks(free_bytes, max_model_len=max_model_len) == expected


@pytest.mark.parametrize(
    ("asked", "free_bytes", "param", "said"),
    [
        ({}, MIB, "kv_cache_memory_bytes", "0.5 of the 1048576 bytes that are free with the model loaded"),
        ({"kv_cache_memory_fraction": 0.1}, 2 * MIB, "kv_cache_memory_fraction", "0.1 of the 2097152 bytes"),
        ({"kv_cache_memory_bytes": 5}, GIB, "kv_cache_memory_bytes", "have 5 bytes (kv_cache_memory_bytes), less than"),
    ],
)
def test_not_even_one_block(asked: dict[str, Any], free_bytes: int, param: str, said: str) -> None:
    with pytest.raises(SluiceError) as caught:
        blocks(free_bytes, **asked)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, param)
    assert said in caught.value.message
    assert "one block of 32 tokens of this model takes (1048576 bytes)" in caught.value.message


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.1])
def test_a_fraction_is_one(fraction: float) -> None:
    with pytest.raises(SluiceError, match="must be over 0 and at most 1"):
        check_cache_limits(EngineConfig(model_path="", kv_cache_memory_fraction=fraction))


def test_more_than_is_free_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert blocks(free_bytes=5 * MIB, num_blocks=10) == 10
    assert "may grow to 10 MiB, and only 5 MiB are free" in caplog.text
