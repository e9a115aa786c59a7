"""Blocks that left the KV cache come back, and no token differs for it."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.blocks import BlockHash
from sluice.engine.frames import StepFrame
from sluice.engine.kv_tiers import returns
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.runners.base import Logits, Runner, StepBatch
from sluice.engine.statistics import KvTierStats
from sluice.errors import ErrorCode, SluiceError
from tests.engine.fake_runner import EchoRunner, echo
from tests.engine.scripted_executor import Arrivals, ScriptedExecutor, requests
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("looks_ahead")
POLICIES = ("guaranteed_no_evict", "max_utilization", "static_batch")
BLOCK_BYTES = 4 * 8


LONG = list(range(41))
OTHERS = ([100] * 50, [200] * 50, [300] * 50)
"""Prompts that leave no room for LONG in a cache of 24 blocks of 4 tokens."""


def play(bench: ScriptedExecutor, first_id: int, *prompts: list[int], **fields: object) -> None:
    """Serve the prompts one after another, each as long as its blocks take to be read."""
    for stream_id, prompt in enumerate(prompts, first_id):
        bench.submit(stream_id, prompt, max_tokens=2, **fields)
        step_until(bench, has_ended(bench, stream_id))


def has_ended(bench: ScriptedExecutor, stream_id: int) -> Callable[[KvTierStats], object]:
    return lambda stats: bench.reasons[stream_id] or bench.failures


def step_until(bench: ScriptedExecutor, is_true: Callable[[KvTierStats], object]) -> None:
    """Take steps until it is so, however long the disk's thread takes."""

    def claim() -> bool:
        for _ in range(100):
            bench.step()
            if is_true(tier_stats(bench)):
                return True
        return False

    wait_until(claim, lambda: tier_stats(bench))


def close(bench: ScriptedExecutor) -> None:
    """End the executor as a Shutdown command does."""
    bench.executor._is_shut_down = True
    bench.executor.run()


def tier_stats(bench: ScriptedExecutor) -> KvTierStats:
    stats = bench.executor.stats().kv_tiers
    assert stats is not None
    return stats


@pytest.mark.parametrize("policy", POLICIES)
@settings(deadline=None, max_examples=8)
@given(arrivals=requests, num_blocks=st.integers(1, 40))
def test_everyone_gets_the_right_tokens_under_pressure(policy: str, arrivals: Arrivals, num_blocks: int) -> None:
    bench = ScriptedExecutor(scheduler_policy=policy, kv_host_cache_bytes=num_blocks * BLOCK_BYTES)
    bench.play(arrivals)
    for stream_id, (prompt, max_tokens, _) in enumerate(arrivals):
        assert bench.tokens[stream_id] == echo(prompt, max_tokens)
    assert bench.executor.stats().num_blocks_free == 24


def test_a_prefix_that_the_cache_gave_up_counts_as_cached_when_it_comes_back() -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES)
    play(bench, 0, LONG, *OTHERS[:2], LONG)
    assert bench.tokens[3] == bench.tokens[0] == echo(LONG, 2)
    assert bench.details[3].num_cached_tokens == 40
    stats = tier_stats(bench)
    assert stats.host_hits_total > 0
    assert stats.restored_tokens_total == stats.host_hits_total * 4


@pytest.mark.parametrize("host_blocks", [0, 2])
def test_a_prefix_comes_back_from_the_disk(tmp_path: Path, host_blocks: int) -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=host_blocks * BLOCK_BYTES, kv_disk_cache=str(tmp_path))
    many = [[400 + 50 * each + position for position in range(50)] for each in range(60)]
    play(bench, 0, LONG, *many)
    step_until(bench, lambda stats: stats.disk_blocks >= 10)
    play(bench, 100, LONG)
    assert bench.tokens[100] == echo(LONG, 2)
    assert bench.details[100].num_cached_tokens == 40
    stats = tier_stats(bench)
    assert stats.disk_hits_total > 0
    assert stats.disk_damaged_total == 0
    close(bench)


def test_a_restart_finds_the_blocks_of_cache_and_memory(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"kv_host_cache_bytes": 100 * BLOCK_BYTES, "kv_disk_cache": str(tmp_path)}
    bench = ScriptedExecutor(**limits)
    play(bench, 0, LONG, *OTHERS)
    assert tier_stats(bench).disk_blocks == 0, "all of it fits into memory"
    close(bench)
    bench = ScriptedExecutor(**limits)
    for stream_id, prompt in enumerate((LONG, *OTHERS)):
        play(bench, stream_id, prompt)
        assert bench.tokens[stream_id] == echo(prompt, 2)
        assert bench.details[stream_id].num_cached_tokens == (len(prompt) - 1) // 4 * 4
    close(bench)


def test_a_changed_byte_on_the_disk_is_computed_and_never_served(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"kv_host_cache_bytes": 100 * BLOCK_BYTES, "kv_disk_cache": str(tmp_path)}
    bench = ScriptedExecutor(**limits)
    play(bench, 0, LONG)
    close(bench)
    (file,) = tmp_path.glob("*.blocks")
    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    bench = ScriptedExecutor(**limits)
    play(bench, 0, LONG)
    assert bench.tokens[0] == echo(LONG, 2)
    assert tier_stats(bench).disk_damaged_total > 0
    assert tier_stats(bench).restored_tokens_total == 0
    close(bench)


def test_salts_and_adapters_keep_blocks_apart(tmp_path: Path) -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES, kv_disk_cache=str(tmp_path))
    play(bench, 0, LONG, *OTHERS, cache_salt="a")
    play(bench, 10, LONG, cache_salt="b")
    assert bench.details[10].num_cached_tokens == 0
    play(bench, 11, *OTHERS, cache_salt="b")
    play(bench, 20, LONG, cache_salt="a")
    assert bench.details[20].num_cached_tokens == 40
    close(bench)


def test_a_full_disk_ends_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    bench = ScriptedExecutor(kv_host_cache_bytes=2 * BLOCK_BYTES, kv_disk_cache=str(tmp_path))
    monkeypatch.setattr(os, "pwrite", refuse)
    play(bench, 0, LONG, *OTHERS, LONG)
    step_until(bench, lambda stats: stats.is_disk_off)
    play(bench, 10, LONG, *OTHERS)
    assert bench.tokens[10] == echo(LONG, 2)
    assert not bench.failures
    close(bench)


def test_a_prefix_that_is_computed_faster_is_not_brought_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES)
    play(bench, 0, LONG, *OTHERS)
    tiers = bench.executor._returns.tiers  # type: ignore[union-attr]
    bench.executor._intake.forecast.pace.observe(16, 1e-6)
    tiers.write_s = 1.0
    num_stored = tier_stats(bench).host_stored_total
    play(bench, 10, LONG)
    assert bench.tokens[10] == echo(LONG, 2)
    stats = tier_stats(bench)
    assert (stats.slower_total, stats.host_hits_total) == (1, 0)
    assert stats.host_stored_total == num_stored, "what is not worth bringing back is not worth keeping"
    assert stats.host_lost_total > 0


def test_a_prefix_that_takes_too_long_is_computed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, Any] = {"kv_host_cache_bytes": 100 * BLOCK_BYTES, "kv_disk_cache": str(tmp_path)}
    bench = ScriptedExecutor(**limits)
    play(bench, 0, LONG)
    close(bench)
    bench = ScriptedExecutor(**limits)
    tiers = bench.executor._returns.tiers  # type: ignore[union-attr]
    monkeypatch.setattr(tiers, "read_ahead", lambda *_: None)
    bench.submit(0, LONG, max_tokens=2)
    for _ in range(20):
        bench.step()
    assert bench.executor.stats().num_waiting == 1
    bench.now += returns.FIRST_WAIT_S
    bench.finish()
    assert bench.tokens[0] == echo(LONG, 2)
    assert tier_stats(bench).late_total == 1
    close(bench)


def test_a_step_copies_no_more_than_its_time_allows() -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES)
    tiers = bench.executor._returns.tiers  # type: ignore[union-attr]
    play(bench, 0, LONG, OTHERS[0])
    before = tier_stats(bench)
    bench.submit(2, OTHERS[1], max_tokens=2)
    while tier_stats(bench).host_stored_total == before.host_stored_total:
        tiers.read_s = returns.IDLE_COPY_S / 2
        bench.step()
    assert tier_stats(bench).host_stored_total - before.host_stored_total <= 2
    bench.finish()


def test_of_blocks_that_there_is_no_time_for_the_beginnings_of_prefixes_are_kept() -> None:
    """The cache gives up the end of a prefix first."""
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES)
    tiers = bench.executor._returns.tiers  # type: ignore[union-attr]
    end, beginning = (BlockHash(bytes([number]) * 16) for number in range(2))
    tiers.read_s = 1.0
    tiers.store([(0, end), (1, beginning)], max_seconds=1.0)
    assert [tiers.num_ready([each]) for each in (end, beginning)] == [0, 1]
    assert tier_stats(bench).host_lost_total == 1


def test_nothing_comes_back_for_a_request_that_there_is_no_room_for() -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES)
    play(bench, 0, LONG, *OTHERS)
    bench.submit(10, [500] * 20, max_tokens=40)  # 15 of 24 blocks
    bench.submit(11, LONG, max_tokens=2)
    while not bench.reasons[10]:
        assert tier_stats(bench).host_hits_total == 0
        bench.step()
    bench.finish()
    assert tier_stats(bench).host_hits_total > 0


def test_a_long_prefix_comes_back_over_several_steps() -> None:
    bench = ScriptedExecutor(kv_host_cache_bytes=100 * BLOCK_BYTES)
    play(bench, 0, LONG, *OTHERS)
    tiers = bench.executor._returns.tiers  # type: ignore[union-attr]
    bench.submit(10, LONG, max_tokens=2)
    num_restored = []
    while not bench.reasons[10]:
        tiers.write_s = returns.IDLE_COPY_S / 2
        before = tier_stats(bench).host_hits_total
        bench.step()
        num_restored.append(tier_stats(bench).host_hits_total - before)
    assert bench.tokens[10] == echo(LONG, 2)
    assert max(num_restored) <= 2
    assert sum(num_restored) == tier_stats(bench).host_hits_total > 2
    assert bench.details[10].num_cached_tokens == 40


class PlainRunner(Runner):
    """A runner whose blocks cannot be copied."""

    def __init__(self) -> None:
        self._runner = EchoRunner(num_blocks=24, block_size=4, max_model_len=64)
        self.info = self._runner.info

    def run(self, batch: StepBatch) -> Logits:
        return self._runner.run(batch)

    def close(self) -> None:
        self._runner.close()


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"kv_host_cache_bytes": BLOCK_BYTES - 1}, "kv_host_cache_bytes", "32 bytes; got 31"),
        ({"kv_disk_cache": "/tmp", "kv_disk_cache_bytes": 1}, "kv_disk_cache_bytes", "32 bytes; got 1"),
        ({"kv_host_cache_bytes": 1 << 20, "enable_prefix_caching": False}, "kv_host_cache_bytes", "prefix"),
        ({"kv_disk_cache": "/tmp", "enable_prefix_caching": False}, "kv_disk_cache", "prefix"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(fields: dict[str, Any], param: str, message: str) -> None:
    with pytest.raises(SluiceError, match=message) as caught:
        ScriptedExecutor(**fields)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, param)


def test_a_runner_whose_blocks_cannot_be_copied_is_refused() -> None:
    bench = ScriptedExecutor()
    config = msgspec.structs.replace(bench.executor._config, kv_host_cache_bytes=1 << 20)

    def drop(frame: StepFrame) -> None: ...

    with pytest.raises(SluiceError, match="echo cannot copy KV blocks; serve without kv_host_cache_bytes") as caught:
        InflightExecutor(PlainRunner(), config, bench.script.receive, drop)
    assert caught.value.code is ErrorCode.UNIMPLEMENTED
