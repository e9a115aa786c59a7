from hypothesis import given
from hypothesis import strategies as st

from sluice.engine.blocks import HashChain

tokens = st.lists(st.integers(0, 3), max_size=24)


def hashes(token_ids: list[int], salt: str = "") -> list[bytes]:
    return [bytes(one) for one in HashChain(salt, 4).hashes(token_ids, len(token_ids) // 4)]


@given(tokens, tokens)
def test_equal_hashes_mean_equal_prefixes(first: list[int], second: list[int]) -> None:
    for index, (one, other) in enumerate(zip(hashes(first), hashes(second), strict=False)):
        end = 4 * (index + 1)
        assert (one == other) == (first[:end] == second[:end])


def test_salts_keep_tenants_apart() -> None:
    assert not set(hashes([1] * 16, "a")) & set(hashes([1] * 16, "b"))
    assert len(set(hashes([1] * 16))) == 4, "equal blocks in other places are other blocks"


def test_a_chain_grows_with_its_sequence() -> None:
    chain = HashChain("", 2)
    context = [1, 2, 3, 4]
    first = list(chain.hashes(context, 2))
    context += [5, 5]
    assert chain.hashes(context, 3)[:2] == first
    assert chain.hashes(context, 3) == HashChain("", 2).hashes(context, 3)
