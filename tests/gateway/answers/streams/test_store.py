"""The bounds of what is kept: bytes, number and time; and a Redis that two gateways share, which goes and comes."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sluice.engine.types import TokenEvent
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import End, Head, KeptStream, Origin, Pieces, Tokens
from sluice.gateway.answers.streams.shared import Recorded, SharedStreams
from sluice.gateway.answers.streams.store import IdempotencyKey, StreamLimits, StreamStore, make_stream_id
from sluice.state.log import PIECE_OVERHEAD_BYTES, EventLog
from tests.serving.caching.parts import RedisServer
from tests.waiting import until

HEAD = Head(200, [(b"content-type", b"text/event-stream")])
KEY = IdempotencyKey("owner", "key")


def origin_of(keep_s: float = 60.0, body: bytes = b"") -> Origin:
    return Origin(make_stream_id(), "owner", "request", "/v1/x", b"", [], body, True, keep_s, 0.0)


@pytest.fixture
async def store() -> AsyncIterator[StreamStore]:
    found = StreamStore(StreamLimits(max_bytes=100_000, max_count=4, max_stream_bytes=40_000))
    yield found
    await found.close()
    assert found.num_bytes == 0


def begun(
    store: StreamStore, num_bytes: int = 0, keep_s: float = 60.0, key: IdempotencyKey | None = None
) -> KeptStream:
    kept = store.add(origin_of(keep_s), key)
    kept.publish(HEAD)
    kept.publish(Pieces([b"x" * 1000] * (num_bytes // 1000)))
    return kept


async def read(log: EventLog, start: int) -> bytes:
    return b"".join([piece async for piece in log.follow(start)])


async def test_followers_get_what_comes_once_and_in_order() -> None:
    log = EventLog()
    readers = [asyncio.create_task(read(log, start)) for start in (0, 2, 5)]
    for number in range(6):
        log.append([b"%d" % number])
        await asyncio.sleep(0)
    log.end()
    assert await asyncio.gather(*readers) == [b"012345", b"2345", b"5"]
    assert await read(log, 6) == b""


async def test_a_log_loses_its_first_pieces_and_says_so() -> None:
    log = EventLog(max_bytes=10 * (1 + PIECE_OVERHEAD_BYTES))
    for number in range(25):
        log.append([b"%d" % (number % 10)])
        assert log.num_bytes <= 10 * (1 + PIECE_OVERHEAD_BYTES)
    log.end()
    assert len(log) == 25
    assert await read(log, log.first) == b"".join(log.kept())
    with pytest.raises(SluiceError, match="are not kept any more"):
        await read(log, log.first - 1)
    with pytest.raises(SluiceError, match="must be at most 25"):
        log.check(26)


async def test_a_follower_that_is_too_slow_is_told(store: StreamStore) -> None:
    kept = begun(store, 1000)
    pieces = kept.log.follow(0)
    await anext(pieces)
    kept.publish(Pieces([b"y" * 1000] * 60))
    with pytest.raises(SluiceError, match="are not kept any more") as caught:
        await anext(pieces)
    assert caught.value.code is ErrorCode.NOT_FOUND


async def test_those_that_ended_first_make_room(store: StreamStore) -> None:
    first, second, third = (begun(store, 30_000) for _ in range(3))
    second.publish(End(True))
    first.publish(End(True))
    begun(store, 30_000)
    assert store.find("owner", second.id) is None
    assert store.find("owner", first.id) is first
    third.publish(Pieces([b"z" * 1000] * 5))
    assert store.num_bytes <= 100_000


async def test_where_none_has_ended_the_one_that_grows_loses_its_beginning(store: StreamStore) -> None:
    kept = [begun(store, 30_000) for _ in range(4)]
    assert store.num_bytes <= 100_000
    assert [each.log.first for each in kept[:3]] == [0, 0, 0]
    assert kept[3].log.first > 0


async def test_more_than_may_be_are_refused_unless_one_has_ended(store: StreamStore) -> None:
    kept = [begun(store) for _ in range(4)]
    with pytest.raises(SluiceError, match="--stream-store-count") as caught:
        begun(store)
    assert caught.value.code is ErrorCode.OVERLOADED
    kept[2].publish(End(True))
    begun(store)
    assert store.find("owner", kept[2].id) is None


async def test_time_without_a_reader_ends_it(store: StreamStore) -> None:
    unread, read, ended = (begun(store, keep_s=0.05) for _ in range(3))
    ended.publish(End(True))
    with read.reading():
        await until(lambda: unread.gone.is_set() and store.find("owner", ended.id) is None)
        assert unread.failure is not None
        assert not read.gone.is_set()
    await until(read.gone.is_set)
    assert store.counts["expired", "live"] == 2


async def test_a_whole_answer_of_any_size_is_for_those_who_wait_for_it(store: StreamStore) -> None:
    kept = store.add(origin_of(), KEY)
    with kept.reading():
        kept.publish(Head(200, [(b"content-type", b"application/json")]))
        kept.publish(Pieces([b"x" * 30_000] * 5))
        kept.publish(End(True))
        assert len(await read(kept.log, 0)) == 150_000
        assert store.find_by_key(KEY) is None
    assert store.find("owner", kept.id) is None
    assert store.num_bytes == 0


@pytest.mark.parametrize(("is_whole", "is_kept"), [(True, True), (False, False)])
async def test_a_key_stands_for_a_whole_answer(store: StreamStore, is_whole: bool, is_kept: bool) -> None:
    kept = begun(store, key=KEY)
    assert store.find_by_key(KEY) is kept
    kept.publish(End(is_whole))
    assert (store.find_by_key(KEY) is kept) == is_kept
    assert store.find("owner", kept.id) is kept
    assert store.find("another", kept.id) is None


LIMITS = StreamLimits()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    redis = RedisServer(tmp_path)
    yield redis
    redis.kill()


class Gateway:
    """The kept streams of one gateway."""

    def __init__(self, server: RedisServer) -> None:
        self.store = StreamStore(LIMITS)
        self.shared = SharedStreams(f"redis://127.0.0.1:{server.port}/0", self.store, LIMITS, self._rescue)

    async def _rescue(self, kept: KeptStream, recorded: Recorded) -> None:
        kept.publish(Pieces([b"another c", b"another d", b"another e"]))

    async def begin(self) -> KeptStream:
        kept = self.store.add(origin_of())
        assert await self.shared.begin(kept, None) == ""
        kept.publish(HEAD)
        return kept

    async def die(self) -> None:
        """End without a word, and let the lease run out."""
        for task in self.shared._tasks:
            task.cancel()
        await self.shared.logs.leave()
        await self.close()

    async def close(self) -> None:
        await self.shared.close()
        await self.store.close()


@pytest.fixture
async def gateways(server: RedisServer) -> AsyncIterator[tuple[Gateway, Gateway]]:
    await server.start()
    both = Gateway(server), Gateway(server)
    await until(lambda: all(each.shared.is_up for each in both))
    yield both
    for each in both:
        await each.close()


async def test_events_sent_without_redis_are_not_replaced_by_others(
    gateways: tuple[Gateway, Gateway],
) -> None:
    near, far = gateways
    kept = await near.begin()
    kept.publish(Tokens(0, TokenEvent(0, [1])))
    kept.publish(Pieces([b"a", b"b"]))
    await until(lambda: len(kept.log) == 2)
    kept.publish(Pieces([b"c"]))  # it waits to be sent
    near.shared.lose(OSError("away"))
    kept.publish(Pieces([b"d"]))
    assert len(kept.log) == 4  # what its readers have got, and Redis has not
    await near.die()
    copy = await far.shared.find("owner", kept.id)
    assert copy is not None
    with copy.reading(), pytest.raises(SluiceError, match="events 3 to 4 of the stream are lost") as refused:
        await read(copy.log, 4)
    assert refused.value.code is ErrorCode.NOT_FOUND
    await until(lambda: len(copy.log) == 5)
    assert b"".join(copy.log.kept()) == b"abanother canother danother e"
    with pytest.raises(SluiceError, match="events 3 to 4 of the stream are lost"):
        copy.log.check(4, num_takeovers=0)  # there is a fourth event now, which is another one
    assert copy.event_prefix == f"{kept.id}.1"
    copy.log.check(4, num_takeovers=1)
    copy.log.check(2, num_takeovers=0)
    with pytest.raises(SluiceError, match="goes on at another gateway") as moved:
        kept.log.check(4, num_takeovers=1)
    assert moved.value.code is ErrorCode.UNAVAILABLE


async def test_a_redis_that_is_back_is_not_lost_again_with_each_connection_from_before(
    server: RedisServer, gateways: tuple[Gateway, Gateway]
) -> None:
    shared = gateways[0].shared
    await asyncio.gather(*(shared.client.ping() for _ in range(8)))
    server.kill()
    await until(lambda: not shared.is_up)
    await server.start()
    await until(lambda: shared.is_up)
    assert await asyncio.gather(*(shared.client.ping() for _ in range(8))) == [True] * 8
