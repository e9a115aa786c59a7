"""The archive of responses: its place and its limits, and what it says of a server that ended."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from time import time

import msgspec
import pytest
from redis.asyncio import Redis

from sluice.engine.client.stream import Consumer
from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import KeptStream
from sluice.gateway.api.openai.responses.archive import (
    LEASE_S,
    Archive,
    PromptItems,
    ResponseRecord,
    StoredConversation,
    open_archive,
)
from sluice.gateway.api.openai.responses.background import BackgroundRun, BackgroundRuns
from sluice.gateway.api.openai.responses.items import ItemIds
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.api.translators import Answer
from sluice.gateway.options.responses import ResponsesOptions
from sluice.pipelines.text.stream import Generate, give
from sluice.pipelines.text.types import TextEvent
from sluice.state.log import EventLog
from tests.clock import ManualClock
from tests.gateway.answers.streams.test_store import origin_of
from tests.pulled import collected
from tests.serving.caching.parts import RedisServer

TEXT = TextEvent("Hi", 1, 3, 1)


def open_file(folder: Path, max_bytes: int = 1 << 20, clock: Callable[[], float] = time) -> Archive:
    options = ResponsesOptions(store=str(folder / "r.sqlite"), ttl_s=100, max_bytes=max_bytes)
    archive = open_archive(options, folder, clock)
    assert archive is not None
    return archive


async def test_changes_at_the_same_time_all_count(tmp_path: Path) -> None:
    archive = open_file(tmp_path)
    await archive.add_conversation("me", "conv_1", StoredConversation(0, {}, []))

    async def add(number: int) -> None:
        await archive.change_conversation("me", "conv_1", lambda each: each.items.append({"id": number}))

    await asyncio.gather(*map(add, range(8)))
    kept = await archive.conversation("me", "conv_1")
    assert sorted(item["id"] for item in kept.items) == list(range(8))
    with pytest.raises(SluiceError, match="not found"):
        await archive.conversation("other", "conv_1")
    await archive.close()


async def test_a_record_has_a_largest_size(tmp_path: Path) -> None:
    archive = open_file(tmp_path, max_bytes=1000)
    with pytest.raises(SluiceError, match="--responses-max-size") as refusal:
        await archive.add_conversation("me", "conv_1", StoredConversation(0, {"a": "x" * 1000}, []))
    assert refusal.value.code is ErrorCode.TOO_LARGE
    await archive.close()


async def test_a_redis_has_a_hash_for_each_record_as_it_always_had(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    await server.start()
    url = f"redis://127.0.0.1:{server.port}/0"
    archive = open_archive(ResponsesOptions(store=url), tmp_path)
    assert archive is not None
    conversation = StoredConversation(7, {}, [])
    async with Redis.from_url(url) as client:
        body = msgspec.msgpack.encode(conversation)
        await client.hset("sluice:responses:me:conv_1", items=["version", 3, "body", body])
        assert await archive.conversation("me", "conv_1") == conversation
        await archive.change_conversation("me", "conv_1", lambda _: None)
        assert await client.hget("sluice:responses:me:conv_1", "version") == b"4"
        assert await client.pttl("sluice:responses:me:conv_1") > 0
    await archive.close()
    server.kill()


async def endless(consumer: Consumer[TextEvent]) -> None:
    await give(consumer, TEXT)
    await asyncio.Event().wait()


async def one_text(consumer: Consumer[TextEvent]) -> None:
    await give(consumer, TextEvent("Hi", 1, 3, 1, FinishReason.STOP))


def make_reply(archive: Archive | None = None) -> ResponseReply:
    response = {"id": "resp_1", "status": "in_progress", "store": True, "output": [], "background": True}
    items = PromptItems([], [{"id": "msg_1", "type": "message"}])
    return ResponseReply(ResponseRecord(archive, "me", response, items), "r", ItemIds("0" * 32))


async def start(runs: BackgroundRuns, archive: Archive, generate: Generate) -> BackgroundRun:
    reply = make_reply(archive)
    return await runs.start(reply, Answer([generate], reply).stream_texts, is_streamed=True)


async def test_a_response_of_a_server_that_ended_has_failed(tmp_path: Path) -> None:
    clock = ManualClock(1000.0)
    first, second = (open_file(tmp_path, clock=clock) for _ in "ab")
    runs = BackgroundRuns(first, renewal_s=1e6)
    run = await start(runs, first, endless)
    assert run.kept is not None
    stream = run.kept.follow(0)
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
    first, second = (open_file(tmp_path) for _ in "ab")
    runs = BackgroundRuns(first, renewal_s=0.01)
    run = await start(runs, first, endless)
    found = await second.find("me", "resp_1")
    assert runs.find("other", "resp_1") is None
    cancelled = await second.cancel("me", "resp_1", found)
    assert cancelled["status"] == "cancelled"
    assert run.kept is not None
    frames = b"".join([frames async for frames in run.kept.follow(0)])
    assert b'"status":"cancelled"' in frames.rpartition(b"event: ")[2]
    assert runs.find("me", "resp_1") is None
    assert (await second.find("me", "resp_1")).response == cancelled, "the first does not write over it"
    for archive in (first, second):
        await archive.close()


async def test_events_are_archived_whole_also_where_their_log_is_dropped() -> None:
    """A server that ends leaves the logs of streams to others before its background responses have ended."""
    kept = KeptStream(origin_of(), EventLog(), lambda _: None)
    reply = make_reply()
    run = BackgroundRun(reply, Answer([one_text], reply).stream_texts, kept)
    run.append(b"a\n\nb\n\n")
    kept.break_off(SluiceError(ErrorCode.UNAVAILABLE, "moved"))
    run.append(b"c\n\n")
    run.append(b"d\n\ne\n\n")
    assert run.frames(b"f\n\n") == [b"%c\n\n" % each for each in b"abcdef"]


async def test_an_answer_is_given_also_where_it_cannot_be_stored(tmp_path: Path) -> None:
    (tmp_path / "r.sqlite").write_text("not a database, but long enough to be looked at" * 10)
    archive = open_file(tmp_path)
    frames = await collected(Answer([one_text], make_reply(archive)).stream)
    assert b"response.completed" in frames[-1] and b'"store":false' in frames[-1]
    with pytest.raises(SluiceError) as refusal:
        await archive.find("me", "resp_1")
    assert refusal.value.code is ErrorCode.UNAVAILABLE
    await archive.close()
