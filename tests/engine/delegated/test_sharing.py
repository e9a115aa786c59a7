"""Blocks that requests in flight share: counted once, as long as one of them is there."""

from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sluice.engine.blocks import BlockHash, HashChain
from sluice.engine.delegated.admission import BlockSharing, SharedBlocks


@dataclass(eq=False)
class Holder:
    prompt_hashes: list[BlockHash]
    worst_case_blocks: int = 0
    num_allocated_blocks: int = field(default=0)


def holder(tokens: tuple[int, ...]) -> Holder:
    """Return a request with a prompt of as many blocks as tokens."""
    return Holder(HashChain("", 1).hashes(list(tokens), len(tokens)))


PROMPTS = st.lists(st.integers(0, 1), max_size=5).map(tuple)
ENDING_HEIRS = [("add", 0, (1,)), ("begin", 0, ()), *[("add", 0, (1,))] * 3, *[("remove", 0, ())] * 3]
"""A request that computes a block, and three that share it and end one by one."""
CHANGES = st.lists(st.tuples(st.sampled_from(["add", "begin", "remove"]), st.integers(0, 9), PROMPTS), max_size=20)


@pytest.mark.parametrize("sharing", BlockSharing)
@settings(max_examples=60)
@given(changes=CHANGES)
@example(changes=ENDING_HEIRS)
def test_each_shared_block_is_counted_by_one_at_least(
    sharing: BlockSharing, changes: list[tuple[str, int, tuple[int, ...]]]
) -> None:
    shared: SharedBlocks[Holder] = SharedBlocks(sharing)
    in_flight: list[Holder] = []
    for change, number, prompt in changes:
        if change == "add":
            in_flight.append(holder(prompt))
            expected = shared.num_shared(in_flight[-1])
            shared.add(in_flight[-1])
            assert shared.num_shared(in_flight[-1]) == expected
        elif number < len(in_flight) and change == "begin":
            shared.begin(in_flight[number])
        elif number < len(in_flight):
            shared.remove(in_flight.pop(number))
        counted = sum(len(each.prompt_hashes) - shared.num_shared(each) for each in in_flight)
        distinct = len({block_hash for each in in_flight for block_hash in each.prompt_hashes})
        assert counted >= distinct
        if sharing is BlockSharing.AWAITED:
            assert counted == distinct
        if sharing is BlockSharing.NONE:
            assert counted == sum(len(each.prompt_hashes) for each in in_flight)
    for each in in_flight:
        shared.remove(each)
    assert shared.is_empty


def test_what_is_left_of_ended_requests_is_logged_and_forgotten(caplog: pytest.LogCaptureFixture) -> None:
    shared: SharedBlocks[Holder] = SharedBlocks(BlockSharing.AWAITED)
    shared.add(holder((1, 2)))
    for _ in range(2):
        shared.check_empty()
    assert shared.is_empty and shared.num_shared(holder((1, 2))) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "2 blocks are shared by requests that have ended; they are forgotten"
    ]


def test_a_block_is_its_salts_and_its_adapters() -> None:
    shared: SharedBlocks[Holder] = SharedBlocks(BlockSharing.AWAITED)
    shared.add(Holder(HashChain("a", 1, "poet").hashes([1, 2, 3], 3)))
    for salt, adapter, found in (("a", "poet", 2), ("b", "poet", 0), ("a", "", 0)):
        other = Holder(HashChain(salt, 1, adapter).hashes([1, 2, 4], 3))
        assert shared.num_shared(other) == found
