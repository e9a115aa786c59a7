"""The store of responses: one contract over SQLite and Redis, its bounds, and what it says of a server that ended."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

import pytest

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.http.openai.responses.archive import LEASE_S, Archive, StoredConversation
from sluice.gateway.http.openai.responses.background import BackgroundRuns
from sluice.gateway.http.openai.responses.create import PromptItems
from sluice.gateway.http.openai.responses.generate import ResponseTurn, generate_and_keep
from sluice.gateway.http.openai.responses.items import ItemIds
from sluice.gateway.http.openai.responses.records import ABSENT, RecordKey, RecordStore, SqliteRecords, StoreLimits
from sluice.gateway.http.openai.responses.redis_records import RedisRecords
from sluice.gateway.http.openai.responses.reply import ResponseReply
from sluice.pipelines.text.types import TextEvent
from tests.clock import ManualClock
from tests.serving.caching.parts import RedisServer

KEY = RecordKey("me", "resp_1")
LIMITS = StoreLimits(ttl_s=100.0, max_records=4, max_bytes=1000)
ROOMY = LIMITS._replace(max_bytes=1_000_000)
TEXT = TextEvent("Hi", 1, 3, 1)


@pytest.fixture(params=["sqlite", "redis"])
async def records(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RecordStore]:
    if request.param == "sqlite":
        sqlite = SqliteRecords(tmp_path / "folder" / "r.sqlite", LIMITS)
        yield sqlite
        await sqlite.close()
        return
    server = RedisServer(tmp_path)
    await server.start()
    redis = RedisRecords(f"redis://127.0.0.1:{server.port}/0", LIMITS)
    try:
        yield redis
    finally:
        await redis.close()
        server.kill()


async def test_a_record_is_replaced_only_by_who_read_it(records: RecordStore) -> None:
    assert await records.read(KEY) is None
    assert await records.write(KEY, b"one", ABSENT)
    assert not await records.write(KEY, b"two", ABSENT)
    found = await records.read(KEY)
    assert found is not None and found.body == b"one"
    assert await records.write(KEY, b"two", found.version)
    assert not await records.write(KEY, b"three", found.version)
    assert await records.read(KEY._replace(owner="other")) is None
    assert not await records.delete(KEY._replace(owner="other"))
    with pytest.raises(SluiceError) as refusal:
        await records.write(KEY, b"x" * 1001, found.version + 1)
    assert refusal.value.code is ErrorCode.TOO_LARGE
    assert await records.delete(KEY)
    assert not await records.delete(KEY)


async def test_changes_at_the_same_time_all_count(records: RecordStore) -> None:
    archive = Archive(records)
    await archive.add_conversation("me", "conv_1", StoredConversation(0, {}, []))

    async def add(number: int) -> None:
        await archive.change_conversation("me", "conv_1", lambda each: each.items.append({"id": number}))

    await asyncio.gather(*map(add, range(8)))
    kept = await archive.conversation("me", "conv_1")
    assert sorted(item["id"] for item in kept.items) == list(range(8))


async def test_records_expire_and_the_oldest_give_way(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    records = SqliteRecords(tmp_path / "r.sqlite", LIMITS, clock)

    async def left() -> list[int]:
        return [n for n in range(8) if await records.read(RecordKey("me", str(n))) is not None]

    for number in range(5):
        clock.now += 1
        await records.write(RecordKey("me", str(number)), b"x", ABSENT)
    assert await left() == [1, 2, 3, 4], "more than max_records"
    clock.now += 1
    await records.write(RecordKey("me", "1"), b"y" * 500, 1)
    clock.now += 1
    await records.write(RecordKey("me", "5"), b"z" * 500, ABSENT)
    assert await left() == [1, 5], "more than max_bytes, and 1 was written after 2, 3 and 4"
    clock.now += 100
    assert await left() == []
    await records.write(RecordKey("me", "5"), b"z", ABSENT)
    assert await left() == [5]
    await records.close()


async def endless() -> AsyncGenerator[TextEvent, None]:
    yield TEXT
    await asyncio.Event().wait()


async def one_text() -> AsyncGenerator[TextEvent, None]:
    yield TextEvent("Hi", 1, 3, 1, FinishReason.STOP)


def make_turn(events: AsyncGenerator[TextEvent, None]) -> ResponseTurn:
    response = {"id": "resp_1", "status": "in_progress", "store": True, "output": [], "background": True}
    reply = ResponseReply(response, ItemIds("0" * 32))
    items = PromptItems([], [{"id": "msg_1", "type": "message"}])
    return ResponseTurn("me", "r", reply, events, items, {}, outlives_failures=True)


async def test_a_response_of_a_server_that_ended_has_failed(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    first, second = (
        Archive(SqliteRecords(tmp_path / "r.sqlite", LIMITS._replace(max_bytes=10**6), clock)) for _ in "ab"
    )
    runs = BackgroundRuns(first, renewal_s=1e6)
    run = await runs.start(make_turn(endless()), is_streamed=True)
    stream = run.log.follow(0)
    while b"delta" not in await anext(stream):
        pass
    assert (await second.find("me", "resp_1")).response["status"] == "queued", "as its lease says"
    clock.now += LEASE_S + 1
    found = await second.find("me", "resp_1")
    assert (found.response["status"], found.response["error"]["code"]) == ("failed", "server_error")
    await runs.close()
    kept = await first.find("me", "resp_1")
    assert (kept.response["status"], kept.response["error"]["message"]) == (
        "failed",
        "the server ended before the response was complete",
    )
    assert kept.response["output"][0]["content"][0]["text"] == "Hi"
    assert kept.stored.frames is not None and b"response.failed" in kept.stored.frames[-1]
    assert b"".join([frames async for frames in stream]).endswith(kept.stored.frames[-1])
    for archive in (first, second):
        await archive.close()


async def test_a_response_is_cancelled_through_another_server(tmp_path: Path) -> None:
    first, second = (Archive(SqliteRecords(tmp_path / "r.sqlite", ROOMY)) for _ in "ab")
    runs = BackgroundRuns(first, renewal_s=0.01)
    run = await runs.start(make_turn(endless()), is_streamed=True)
    found = await second.find("me", "resp_1")
    assert runs.find("other", "resp_1") is None
    cancelled = await second.cancel("me", "resp_1", found)
    assert cancelled["status"] == "cancelled"
    frames = b"".join([frames async for frames in run.log.follow(0)])
    assert b'"status":"cancelled"' in frames.rpartition(b"event: ")[2]
    assert runs.find("me", "resp_1") is None
    assert (await second.find("me", "resp_1")).response == cancelled, "the first does not write over it"
    for archive in (first, second):
        await archive.close()


async def test_an_answer_is_given_also_where_it_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "r.sqlite").write_text("not a database, but long enough to be looked at" * 10)
    archive = Archive(SqliteRecords(tmp_path / "r.sqlite", LIMITS))
    turn = make_turn(one_text())
    frames = [frame async for frame in generate_and_keep(turn, archive)]
    assert b"response.completed" in frames[-1] and b'"store":false' in frames[-1]
    with pytest.raises(SluiceError) as refusal:
        await archive.find("me", "resp_1")
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    await archive.close()
