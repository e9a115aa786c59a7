import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine import kv_cache
from sluice.engine.blocks import BlockHash, blocks_for, worst_case_blocks
from sluice.engine.kv_cache import BlockPool, BlockTables
from sluice.engine.types import Eviction


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [(1, 1, 1), (32, 1, 1), (32, 2, 2), (31, 2, 1), (33, 32, 2), (1, 32, 1), (1, 33, 2)],
)
def test_the_last_sampled_token_needs_no_slot(prompt: int, max_tokens: int, expected: int) -> None:
    assert worst_case_blocks(prompt, max_tokens, 32) == expected


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_for_is_the_least_that_holds(num_tokens: int, block_size: int) -> None:
    count = blocks_for(num_tokens, block_size)
    assert (count - 1) * block_size < num_tokens <= count * block_size or count == num_tokens == 0


def test_pool_hands_out_each_block_once() -> None:
    pool = BlockPool(5)
    blocks = pool.allocate(5)
    assert sorted(blocks) == [0, 1, 2, 3, 4]
    assert pool.num_free == 0
    with pytest.raises(AssertionError, match="1 blocks planned, 0 free"):
        pool.allocate(1)


def test_a_shared_block_is_free_after_its_last_owner() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.share(blocks)
    pool.release(blocks)
    assert pool.num_used == 1
    pool.release(blocks)
    assert pool.num_used == 0
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)
    with pytest.raises(AssertionError, match="holds nothing"):
        pool.share(blocks)


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]))


def test_an_indexed_block_is_found_after_its_owner_is_gone_until_it_is_needed() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(2)
    pool.index(blocks[0], name(1))
    pool.index(blocks[1], name(2))
    pool.release(blocks)
    assert (pool.num_free, pool.num_cached) == (3, 2)
    assert pool.find([name(1), name(2), name(3)]) == blocks
    pool.allocate(1)
    assert pool.find([name(1), name(2)]) == blocks, "the block that holds nothing goes first"
    pool.allocate(1)
    assert pool.find([name(1), name(2)]) == blocks[:1], "then the end of the prefix"
    pool.share(blocks[:1])
    with pytest.raises(AssertionError, match="1 blocks planned, 0 free"):
        pool.allocate(1)


def test_the_pool_remembers_for_whom_a_block_was_evicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_EVICTIONS", 4)
    pool = BlockPool(1)

    def compute(number: int) -> None:
        pool.reclaimed_for = Eviction(float(number), "tenant", f"session {number}")
        blocks = pool.allocate(1)
        pool.index(blocks[0], name(number))
        pool.release(blocks)

    for number in range(1, 20):
        compute(number)
    known = [number for number in range(20) if pool.eviction_of(name(number)) is not None]
    assert known == list(range(known[0], 19)), "the latest ones"
    assert 4 <= len(known) <= 9
    assert all(pool.eviction_of(name(n)) == Eviction(n + 1.0, "tenant", f"session {n + 1}") for n in known)


def test_the_least_recently_used_prefix_is_reclaimed_first() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for number, block in enumerate(blocks):
        pool.index(block, name(number))
    for block in blocks:
        pool.release([block])
    pool.share(blocks[:1])
    pool.release(blocks[:1])
    assert pool.allocate(2) == blocks[1:]
    assert pool.find([name(0)]) == blocks[:1]


def test_of_two_equal_blocks_the_first_stays_the_one_that_is_found() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.index(first, name(1))
    pool.index(second, name(1))
    assert pool.find([name(1)]) == [first]
    pool.release([second])
    assert pool.num_cached == 0, "the second is just free"


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release", "index"]), st.integers(0, 8)), max_size=60))
def test_pool_adds_up_whatever_is_done(actions: list[tuple[str, int]]) -> None:
    pool = BlockPool(8)
    owners: list[list[int]] = []
    for action, number in actions:
        if action == "allocate" and number <= pool.num_free:
            owners.append(pool.allocate(number))
        elif action == "index" and any(owners):
            held = next(filter(None, owners))
            pool.index(held[number % len(held)], name(number))
        elif action == "share" and owners:
            blocks = owners[number % len(owners)]
            pool.share(blocks)
            owners.append(list(blocks))
        elif action == "release" and owners:
            pool.release(owners.pop(number % len(owners)))
        pool.check()
        assert pool.num_used == len({block for blocks in owners for block in blocks})
    for blocks in owners:
        pool.release(blocks)
    assert pool.num_free == 8


def test_tables_gather_rows_in_the_order_asked() -> None:
    tables = BlockTables(max_num_seqs=3, max_blocks_per_seq=4)
    first, second = tables.open(), tables.open()
    tables.append(first, [7, 8, 9])
    tables.append(second, [3])
    tables.append(second, [5])
    indices, begins = tables.gather([second, first])
    assert indices.tolist() == [3, 5, 7, 8, 9]
    assert begins.tolist() == [0, 2, 5]
    assert tables.close(first) == [7, 8, 9]
    assert tables.blocks(tables.open()) == []


def test_who_follows_the_index_hears_what_entered_and_left_it() -> None:
    pool = BlockPool(2)
    assert pool.take_changes() is None, "nobody follows yet"
    pool.follow(True)
    first, _ = pool.allocate(2)
    pool.index(first, name(1))
    pool.release([first])
    assert pool.take_changes() == ([name(1)], [])
    [again] = pool.allocate(1)
    pool.index(again, name(2))
    assert pool.take_changes() == ([name(2)], [name(1)])
