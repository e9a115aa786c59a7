"""What an engine records while somebody watches: steps, waits, tokens of tenants, and the picture of its blocks."""

from pytest import MonkeyPatch

from engine.blocks import BlockHash
from engine.frames import AskView, TenantTokens
from engine.kv_cache import BlockState, KvCacheManager
from engine.loop import work_log
from engine.loop.block_map import draw_block_map
from engine.loop.work_log import OTHERS, WorkLog
from engine.types import EngineInfo


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_who_asks_again_gets_what_is_new() -> None:
    work = WorkLog(Clock(), lambda: 1000.0)
    assert not work.is_on, "nothing is recorded before somebody asks"
    assert work.view(AskView()).steps == [] and work.is_on
    work.record_step(0.01, 16, 0, 1)
    work.record_step(0.002, 0, 1, 1)
    work.record_wait(0.5)
    work.record_tokens("a", 16, 0)
    work.record_tokens("a", 0, 2)
    view = work.view(AskView(num_steps=1))
    assert (view.num_steps, view.num_waits) == (2, 1)
    [step] = view.steps
    assert (step.at_s, step.duration_ms, step.num_prefill, step.num_decode, step.num_seqs) == (1000.0, 2.0, 0, 1, 1)
    assert view.waits == [0.5] and view.tenants == {"a": TenantTokens(16, 2)}


def test_the_recording_ends_once_nobody_asks() -> None:
    clock = Clock()
    work = WorkLog(clock)
    work.view(AskView(keep_s=5.0))
    work.view(AskView(keep_s=1.0))
    work.record_step(0.01, 0, 1, 1)
    clock.now += 4.0
    work.record_step(0.01, 0, 1, 1)
    assert work.is_on, "the longest wish counts"
    clock.now += 1.0
    work.record_step(0.01, 0, 1, 1)
    assert not work.is_on
    assert work.view(AskView()).num_steps == 0, "it begins anew"


def test_further_tenants_count_together(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(work_log, "MAX_TENANTS", 2)
    work = WorkLog()
    for name in "abcd":
        work.record_tokens(name, 0, 1)
    assert work.view(AskView()).tenants == {
        "a": TenantTokens(0, 1),
        "b": TenantTokens(0, 1),
        OTHERS: TenantTokens(0, 2),
    }


def make_cache(num_blocks: int) -> KvCacheManager:
    """Make a cache for two sequences."""
    info = EngineInfo(
        runtime="openvino",
        model_type="",
        dtype="",
        vocab_size=8,
        eos_token_ids=(),
        max_model_len=num_blocks,
        block_size=1,
        num_blocks=num_blocks,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        load_seconds=0.0,
    )
    return KvCacheManager(info, is_prefix_caching=True)


def hold(kv: KvCacheManager, row: int, count: int) -> list[int]:
    blocks = kv.pool.allocate(count)
    kv.tables.append(row, blocks)
    return blocks


def test_the_map_shows_each_block() -> None:
    kv = make_cache(8)
    assert set(draw_block_map(kv).cells) == {BlockState.FREE}
    [cached] = kv.pool.allocate(1)
    kv.pool.index(cached, BlockHash(b"1" * 16))
    kv.pool.release([cached])
    first, second = kv.tables.open(), kv.tables.open()
    owned, shared = hold(kv, first, 2)
    kv.pool.share([shared])
    kv.tables.append(second, [shared])
    drawn = draw_block_map(kv)
    assert drawn.blocks_per_cell == 1 and drawn.num_shared == 1
    states = dict(enumerate(drawn.cells))
    assert states.pop(cached) == BlockState.CACHED and states.pop(shared) == BlockState.SHARED
    assert states.pop(owned) == BlockState.OWNED
    assert set(states.values()) == {BlockState.FREE} and len(states) == 5


def test_a_cell_of_several_blocks_shows_what_is_in_them() -> None:
    kv = make_cache(7)
    row = kv.tables.open()
    hold(kv, row, 1)  # blocks are handed out from the first on
    drawn = draw_block_map(kv, max_cells=3)
    assert drawn.blocks_per_cell == 3
    assert list(drawn.cells) == [BlockState.OWNED, BlockState.FREE, BlockState.FREE], "one of three is held"
    [shared] = hold(kv, row, 1)
    kv.tables.append(kv.tables.open(), [shared])
    assert list(draw_block_map(kv, max_cells=3).cells) == [3, 0, 0], "of two as frequent states the higher one"
    hold(kv, row, 1)
    assert list(draw_block_map(kv, max_cells=3).cells) == [2, 0, 0], "two are owned, one is shared"
