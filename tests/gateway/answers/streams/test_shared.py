"""Streams in a Redis that two gateways share, while it goes away and comes back."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from sluice.engine.types import TokenEvent
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import KeptStream, Pieces, Tokens
from sluice.gateway.answers.streams.shared import Recorded, SharedStreams
from sluice.gateway.answers.streams.store import StreamLimits, StreamStore
from tests.gateway.answers.streams.test_store import HEAD, origin_of, read
from tests.serving.caching.parts import RedisServer
from tests.waiting import until

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
