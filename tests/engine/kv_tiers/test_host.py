"""The host tier against a plain model of it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.blocks import BlockHash
from sluice.engine.kv_tiers.host import HostTier

NUM_BLOCKS, NUM_IN_TRANSIT = 3, 2
moves = st.lists(st.tuples(st.sampled_from(["keep", "find", "drop", "send", "sent"]), st.integers(0, 7)), max_size=60)


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 16)


@given(moves)
def test_it_keeps_the_most_recently_used_blocks(moves: list[tuple[str, int]]) -> None:
    tier, kept, leaving = HostTier(8, NUM_BLOCKS, NUM_IN_TRANSIT), list[int](), set[int]()
    for move, number in moves:
        match move:
            case "keep" if len(kept) < NUM_BLOCKS and number not in (*kept, *leaving):
                row = tier.take()
                tier.content(row)[:] = number
                tier.keep(name(number), row)
                kept.append(number)
            case "find" if kept or leaving:
                number = sorted((*kept, *leaving))[number % (len(kept) + len(leaving))]
                assert (tier.content(tier.find(name(number))) == number).all()
                if number in kept:
                    kept = [*(each for each in kept if each != number), number]
            case "drop" if kept:
                assert tier.oldest() == name(kept[0])
                tier.drop(name(kept.pop(0)))
            case "send" if kept and len(leaving) < NUM_IN_TRANSIT:
                row = tier.send(name(kept[0]))
                assert (tier.content(row) == kept[0]).all()
                leaving.add(kept.pop(0))
            case "sent" if leaving:
                number = sorted(leaving)[number % len(leaving)]
                tier.sent(name(number))
                leaving.discard(number)
        tier.check(num_filling=0)
        assert all((tier.content(tier.find(name(each))) == each).all() for each in leaving)
        assert len(tier) == len(kept)
        assert tier.is_full == (len(kept) == NUM_BLOCKS)
        assert tier.newest() == [name(each) for each in reversed(kept)]
        assert {each for each in range(8) if name(each) in tier} == {*kept, *leaving}


def test_a_row_that_is_given_back_is_free() -> None:
    tier = HostTier(8, 1, 1)
    tier.give_back(tier.take())
    tier.check(num_filling=0)
    assert tier.content(0).dtype == np.uint8
