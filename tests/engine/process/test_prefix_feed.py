"""What clients are told of the prefix index: all of it in pieces, then its changes, anew where those were too many."""

from pytest import MonkeyPatch

from sluice.engine import kv_cache
from sluice.engine.blocks import BlockHash
from sluice.engine.frames import PrefixChanges
from sluice.engine.kv_cache import BlockPool
from sluice.engine.process import prefix_feed
from sluice.engine.process.prefix_feed import PrefixFeed


def name(number: int) -> BlockHash:
    return BlockHash(number.to_bytes(16, "big"))


class Listener:
    def __init__(self) -> None:
        self.got: dict[bytes, list[PrefixChanges]] = {b"one": [], b"two": []}

    def send(self, client: bytes, changes: PrefixChanges) -> None:
        self.got[client].append(changes)

    def mirror(self, client: bytes) -> set[bytes]:
        hashes: set[bytes] = set()
        for number, each in enumerate(self.got[client], start=1):
            assert each.number == number
            hashes = set() if each.is_first else hashes
            hashes |= {each.stored[i : i + 16] for i in range(0, len(each.stored), 16)}
            hashes -= {each.removed[i : i + 16] for i in range(0, len(each.removed), 16)}
        return hashes


def fill(pool: BlockPool, numbers: range) -> None:
    """Compute as many blocks, index and release them."""
    for number in numbers:
        [block] = pool.allocate(1)
        pool.index(block, name(number))
        pool.release([block])


def test_clients_that_come_at_different_times_know_the_same() -> None:
    pool, listener = BlockPool(8), Listener()
    feed = PrefixFeed(pool, listener.send)
    fill(pool, range(4))
    assert pool._changes is None, "nobody follows, so nothing is recorded"
    feed.follow(b"one", True)
    fill(pool, range(4, 7))
    feed.follow(b"two", True)
    fill(pool, range(7, 12))  # four of the first ones leave
    feed.flush()
    expected = {name(number) for number in range(4, 12)}
    assert listener.mirror(b"one") == listener.mirror(b"two") == {*pool.hashes()} == expected
    num_messages = len(listener.got[b"one"])
    feed.flush()
    assert len(listener.got[b"one"]) == num_messages, "nothing has changed"
    feed.follow(b"one", False)
    feed.follow(b"two", False)
    assert pool._changes is None


def test_a_block_that_comes_and_goes_is_told_as_it_is_now() -> None:
    pool, listener = BlockPool(1), Listener()
    feed = PrefixFeed(pool, listener.send)
    feed.follow(b"one", True)
    fill(pool, range(3))
    feed.flush()
    [_, changes] = listener.got[b"one"]
    assert (changes.stored, changes.removed) == (name(2), name(0) + name(1))


def test_messages_are_of_bounded_length(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_feed, "MAX_HASHES", 3)
    pool, listener = BlockPool(20), Listener()
    feed = PrefixFeed(pool, listener.send)
    fill(pool, range(10))
    feed.follow(b"one", True)
    assert [len(each.stored) // 16 for each in listener.got[b"one"]] == [3, 3, 3, 1]
    fill(pool, range(10, 25))
    feed.flush()
    assert listener.mirror(b"one") == {*pool.hashes()}
    assert max(len(each.stored) for each in listener.got[b"one"]) == 48


def test_too_many_changes_start_anew(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_CHANGES", 5)
    pool, listener = BlockPool(20), Listener()
    feed = PrefixFeed(pool, listener.send)
    feed.follow(b"one", True)
    fill(pool, range(15))
    assert pool._changes is not None
    assert len(pool._changes) == 6
    feed.flush()
    assert listener.got[b"one"][-1].is_first
    fill(pool, range(15, 18))
    feed.flush()
    assert not listener.got[b"one"][-1].is_first
    assert listener.mirror(b"one") == {*pool.hashes()}
