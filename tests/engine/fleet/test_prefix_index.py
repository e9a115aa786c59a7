"""The prefix index beside a naive one, and what it forgets."""

import random
from hashlib import blake2b

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.engine.fleet.prefix_index import PrefixIndex

NUM_REPLICAS = 5
EXPECTED_S = 10.0


def block(*path: int) -> bytes:
    return blake2b(bytes(path), digest_size=16).digest()


def chain(*path: int) -> list[bytes]:
    """Return the hashes of a prompt whose blocks have the contents `path`: equal beginnings have equal hashes."""
    return [block(*path[: end + 1]) for end in range(len(path))]


class NaiveIndex:
    """Sets of what each replica has and is expected to have."""

    def __init__(self) -> None:
        self.held: dict[int, set[bytes]] = {replica: set() for replica in range(NUM_REPLICAS)}
        self.expected: dict[int, dict[bytes, float]] = {replica: {} for replica in range(NUM_REPLICAS)}
        self.numbers: dict[int, int | None] = dict.fromkeys(range(NUM_REPLICAS))

    def forget(self, replica: int) -> None:
        self.held[replica], self.expected[replica], self.numbers[replica] = set(), {}, None

    def expire(self, now: float) -> None:
        for replica, pending in self.expected.items():
            self.expected[replica] = {each: until for each, until in pending.items() if until > now}

    def leading_blocks(self, hashes: list[bytes]) -> list[int]:
        counts = []
        for replica in range(NUM_REPLICAS):
            has = self.held[replica] | self.expected[replica].keys()
            counts.append(next((at for at, each in enumerate(hashes) if each not in has), len(hashes)))
        return counts


paths = st.lists(st.integers(0, 1), min_size=1, max_size=12).map(tuple)
replicas = st.integers(0, NUM_REPLICAS - 1)
changes = st.one_of(
    st.tuples(st.just("store"), replicas, paths),
    st.tuples(st.just("drop"), replicas, paths),
    st.tuples(st.just("expect"), replicas, paths),
    st.tuples(st.just("anew"), replicas, paths),
    st.tuples(st.just("gap"), replicas, paths),
    st.tuples(st.just("forget"), replicas, paths),
    st.tuples(st.just("later"), replicas, paths),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(changes, max_size=40), st.lists(paths, min_size=1, max_size=8))
def test_counts_what_a_naive_index_counts(
    steps: list[tuple[str, int, tuple[int, ...]]], asked: list[tuple[int, ...]]
) -> None:
    index, naive, now = PrefixIndex(expected_s=EXPECTED_S), NaiveIndex(), 0.0
    numbers = dict.fromkeys(range(NUM_REPLICAS), 0)
    for kind, replica, path in steps:
        now += 1.0
        hashes, number = chain(*path), numbers[replica]
        is_known = naive.numbers[replica] is not None
        if kind == "store":
            numbers[replica] += 1
            assert index.apply(replica, number, b"".join(hashes), b"", False) == is_known
            if is_known:
                naive.held[replica].update(hashes)
                for each in hashes:
                    naive.expected[replica].pop(each, None)
        elif kind == "drop":  # a block and all after it, as a replica does
            gone = {each for each in naive.held[replica] if each in _descendants(hashes[-1])}
            if is_known and not gone & naive.expected[replica].keys():
                numbers[replica] += 1
                assert index.apply(replica, number, b"", b"".join(gone), False)
                naive.held[replica] -= gone
        elif kind == "expect":
            index.expect(replica, hashes, now)
            naive.expire(now)
            for each in hashes:
                if each not in naive.held[replica]:
                    naive.expected[replica][each] = now + EXPECTED_S
        elif kind == "anew":
            naive.forget(replica)
            naive.held[replica], naive.numbers[replica] = set(hashes), number
            numbers[replica] += 1
            assert index.apply(replica, number, b"".join(hashes), b"", True)
        elif kind == "gap":
            numbers[replica] += 2
            assert not index.apply(replica, number + 1, b"".join(hashes), b"", False)
            if is_known:
                naive.forget(replica)
        elif kind == "forget":
            index.forget(replica)
            naive.forget(replica)
        else:
            now += EXPECTED_S
            index.expect(replica, [], now)
            naive.expire(now)
        for path in asked:
            counted = [*index.leading_blocks(chain(*path)), *[0] * NUM_REPLICAS][:NUM_REPLICAS]
            assert counted == naive.leading_blocks(chain(*path))


ALL_PATHS = [tuple(number >> bit & 1 for bit in range(size)) for size in range(1, 13) for number in range(2**size)]
BLOCKS = {path: block(*path) for path in ALL_PATHS}
PATHS = {each: path for path, each in BLOCKS.items()}


def _descendants(each: bytes) -> "_Descendants":
    return _Descendants(PATHS[each])


class _Descendants:
    def __init__(self, path: tuple[int, ...]) -> None:
        self._path = path

    def __contains__(self, each: bytes) -> bool:
        return PATHS[each][: len(self._path)] == self._path


def test_a_long_prompt_is_counted_exactly_wherever_replicas_stop() -> None:
    rng = random.Random(3)
    hashes = [rng.randbytes(16) for _ in range(625)]
    index, held = PrefixIndex(), [rng.randrange(626) for _ in range(64)]
    for replica, count in enumerate(held):
        index.apply(replica, 0, b"".join(hashes[:count]), b"", True)
    assert index.leading_blocks(hashes) == held
    assert index.leading_blocks(hashes[:100]) == [min(count, 100) for count in held]


def test_beyond_its_bound_it_forgets_the_least_recently_used_blocks() -> None:
    index = PrefixIndex(max_blocks=8)
    old, used, new = chain(0, 0, 0, 0), chain(1, 1, 1, 1), chain(0, 1, 1, 1)
    index.apply(0, 0, b"".join(old + used), b"", True)
    assert (len(index), index.num_forgotten) == (8, 0)
    index.expect(0, used, 0.0)
    index.apply(0, 1, b"".join(new[1:]), b"", False)
    assert (len(index), index.num_forgotten) == (8, 3)
    assert index.leading_blocks(used) == [4]
    assert index.leading_blocks(old) == [0]


def test_a_hole_that_forgetting_makes_ends_the_count() -> None:
    index = PrefixIndex(max_blocks=5)
    prompt = chain(0, 0, 0, 0)
    index.apply(0, 0, b"".join(prompt), b"", True)
    index.expect(0, prompt[:1], 0.0)
    index.apply(0, 1, block(9) + block(8), b"", False)  # prompt[1] is the oldest now
    assert index.num_forgotten == 1
    assert index.leading_blocks(prompt) == [1]


def test_expected_blocks_expire_unless_the_replica_reports_them() -> None:
    index, prompt = PrefixIndex(expected_s=5.0), chain(0, 1, 0, 1)
    index.apply(2, 7, b"", b"", True)
    index.expect(2, prompt, 100.0)
    assert index.leading_blocks(prompt) == [0, 0, 4]
    index.apply(2, 8, b"".join(prompt[:3]), b"", False)
    index.expect(0, [], 104.9)
    assert index.leading_blocks(prompt)[2] == 4
    index.expect(0, [], 105.0)
    assert index.leading_blocks(prompt)[2] == 3


def test_expectations_are_bounded_too() -> None:
    index = PrefixIndex(max_blocks=100)
    for number in range(50):
        index.expect(0, chain(*[number % 200] * 10), 0.0)
    assert len(index) <= 100
    assert index._num_expectations <= 100


def test_bits_of_forgotten_replicas_are_used_again() -> None:
    index, prompt = PrefixIndex(), chain(0, 1, 1)
    for number in range(200):
        replica = number % 3
        index.apply(replica, number, b"".join(prompt), b"", True)
        counts = index.leading_blocks(prompt)
        assert counts == [3] * min(number + 1, 3)
    assert index._next_bit < 10


def test_half_a_hash_is_refused() -> None:
    with pytest.raises(ValueError, match="stored has 17 bytes; expected hashes of 16 bytes each"):
        PrefixIndex().apply(0, 0, bytes(17), b"", True)
