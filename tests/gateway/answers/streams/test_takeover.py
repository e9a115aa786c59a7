"""Two gateways of one process with one Redis: each answers for the streams of the other, and goes on with them where
that dies. `test_two_gateways.py` has what processes and a model show at length."""

import asyncio
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from redis.asyncio import Redis
from starlette.types import Receive, Scope, Send

from sluice.gateway.answers.streams.kept import Pieces
from sluice.gateway.answers.streams.service import DetachedRun
from sluice.gateway.answers.streams.shared import SharedStreams
from sluice.gateway.answers.streams.store import StreamLimits, StreamStore
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.streams import ResumeOptions
from tests.gateway.answers.streams.test_resumption import REQUESTS, RESUMABLE, texts_of
from tests.gateway.answers.streams.test_store import HEAD, origin_of
from tests.gateway.front.http.live import LiveServer, live_server
from tests.serving.caching.parts import RedisServer
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    asyncio.run(server.start())
    yield server
    server.kill()


def config_of(redis: RedisServer) -> ServeConfig:
    return ServeConfig(streams=ResumeOptions(resume_s=60.0, store=f"redis://127.0.0.1:{redis.port}/0", max_count=8))


@pytest.fixture(scope="module")
def second(redis: RedisServer) -> Iterator[LiveServer]:
    """A gateway that stays."""
    with live_server(config_of(redis)) as running:
        wait_until(lambda: shared_of(running).is_up)
        yield running


@pytest.fixture
def first(redis: RedisServer) -> Iterator[LiveServer]:
    """A gateway that a test may do with as it likes."""
    with live_server(config_of(redis)) as running:
        wait_until(lambda: shared_of(running).is_up)
        yield running


def shared_of(live: LiveServer) -> SharedStreams:
    shared = live.streams.shared
    assert isinstance(shared, SharedStreams)
    return shared


async def die(shared: SharedStreams) -> None:
    """Say nothing more to Redis, and let the lease run out."""
    for task in shared._tasks:
        task.cancel()
    await shared.logs.leave()


async def lose(shared: SharedStreams) -> str:
    """Let the store be away for a moment, and return what is said of it."""
    shared.lose(OSError("away"))
    return shared.problem


async def forget_all(shared: SharedStreams) -> None:
    """Let Redis lose what it has."""
    await shared.client.flushall()


def ids_of(content: bytes) -> list[str]:
    return [each.decode() for each in re.findall(rb"^id: (\S+)$", content, re.MULTILINE)]


@pytest.mark.parametrize("num_steps", [1, 2, 5, 9])
@pytest.mark.parametrize("name", ["completion", "several", "logprobs", "messages"])
def test_a_stream_goes_on_at_the_other_gateway_wherever_its_own_dies(
    first: LiveServer, second: LiveServer, name: str, num_steps: int
) -> None:
    path, body = REQUESTS[name]
    uncut = second.post(path, body).content
    first.runner.hold_after(num_steps)
    with ExitStack() as stack:
        stack.callback(first.runner.release)
        response = stack.enter_context(first.client.stream("POST", path, json=body, headers=RESUMABLE))
        stream_id = response.headers["x-sluice-stream"]
        received = next(response.iter_bytes())
        first.runner.wait_held()
        first.run(die(shared_of(first)))
        content = second.get(f"/v1/streams/{stream_id}").content
    assert texts_of(content) == texts_of(uncut)
    ids = ids_of(content)
    assert [int(each.rpartition(":")[2]) for each in ids] == list(range(1, len(ids) + 1))
    own = [each for each in ids if each.startswith(f"{stream_id}:")]
    assert len(own) >= len(ids_of(received)) and all(each.startswith(f"{stream_id}.1:") for each in ids[len(own) :])
    assert len(own) < len(ids)


async def test_of_events_that_come_together_those_are_left_out_that_are_known() -> None:
    kept = StreamStore(StreamLimits()).add(origin_of())
    kept.publish(HEAD)
    kept.publish(Pieces([b"0", b"1", b"2"]))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": HEAD.headers})
        for first in (0, 2, 4):
            await send({"type": "http.response.body", "body": b"data: %d\n\ndata: %d\n\n" % (first, first + 1)})

    await DetachedRun(app, kept, num_known=3)({"type": "http"})
    expected = [f"id: {kept.id}:{number + 1}\ndata: {number}\n\n".encode() for number in (3, 4, 5)]
    assert kept.log.kept()[3:] == expected


def test_a_stream_is_read_on_at_whichever_gateway(first: LiveServer, second: LiveServer) -> None:
    path, body = REQUESTS["completion"]
    first.runner.hold_after(4)
    with ExitStack() as stack:
        stack.callback(first.runner.release)
        response = stack.enter_context(first.client.stream("POST", path, json=body, headers=RESUMABLE))
        first.runner.wait_held()
        place = f"/v1/streams/{response.headers['x-sluice-stream']}"
        readers = stack.enter_context(ThreadPoolExecutor())
        copy, late = readers.submit(second.get, place), readers.submit(second.get, f"{place}?starting_after=2")
        first.runner.release()
        whole = response.read()
    assert copy.result().content == whole
    assert whole.endswith(late.result().content) and len(ids_of(late.result().content)) == len(ids_of(whole)) - 2


def test_a_stream_is_cancelled_at_whichever_gateway(first: LiveServer, second: LiveServer) -> None:
    path, body = REQUESTS["completion"]
    first.runner.hold_after(4)
    with first.client.stream("POST", path, json=body | {"max_tokens": 900}, headers=RESUMABLE) as response:
        first.runner.wait_held()
        place = f"/v1/streams/{response.headers['x-sluice-stream']}"
        assert second.request("DELETE", place).status_code == 204
        assert second.get(place).status_code == 404
        first.runner.release()
        assert b"was cancelled" in response.read()
    assert first.get(place).status_code == 404


def test_one_gateway_answers_for_both_under_one_key(first: LiveServer, second: LiveServer) -> None:
    path, body = "/v1/completions", {"model": "rill", "prompt": "One", "max_tokens": 10}
    headers = {"idempotency-key": "once"}
    with ThreadPoolExecutor() as clients:
        asked = [clients.submit(each.post, path, body, headers=headers) for each in (first, second) * 3]
        answers = [each.result() for each in asked]
    assert {each.status_code for each in answers} == {200}
    assert len({each.content for each in answers}) == 1
    assert sorted(each.headers.get("idempotent-replayed", "") for each in answers) == ["", *["true"] * 5]
    assert second.post(path, body | {"prompt": "Two"}, headers=headers).status_code == 422


def test_without_redis_a_stream_goes_on_at_its_own_gateway(first: LiveServer, second: LiveServer) -> None:
    path, body = REQUESTS["completion"]
    first.runner.hold_after(4)
    with ExitStack() as stack:
        stack.callback(first.runner.release)
        response = stack.enter_context(first.client.stream("POST", path, json=body, headers=RESUMABLE))
        first.runner.wait_held()
        assert "the stream store is away" in first.run(lose(shared_of(first)))
        first.runner.release()
        whole = response.read()
    assert texts_of(whole) == texts_of(second.post(path, body).content)
    assert first.get(f"/v1/streams/{response.headers['x-sluice-stream']}").content == whole
    wait_until(lambda: shared_of(first).is_up)
    later = first.post(path, body, headers=RESUMABLE)
    assert second.get(f"/v1/streams/{later.headers['x-sluice-stream']}").content == later.content


def test_what_redis_loses_goes_on_at_its_own_gateway(first: LiveServer, second: LiveServer) -> None:
    """A reader at the other one is broken off, and does not take it for cancelled."""
    path, body = REQUESTS["several"]
    uncut = second.post(path, body).content
    first.runner.hold_after(4)
    with ExitStack() as stack:
        stack.callback(first.runner.release)
        response = stack.enter_context(first.client.stream("POST", path, json=body, headers=RESUMABLE))
        first.runner.wait_held()
        place = f"/v1/streams/{response.headers['x-sluice-stream']}"
        second_reader = stack.enter_context(second.client.stream("GET", place))
        first.run(forget_all(shared_of(first)))
        with pytest.raises(Exception, match="incomplete chunked read"):
            second_reader.read()
        first.runner.release()
        assert texts_of(response.read()) == texts_of(uncut)
    assert texts_of(first.get(place).content) == texts_of(uncut)


def test_redis_has_no_more_than_its_gateways_keep(first: LiveServer, redis: RedisServer) -> None:
    """Past the bounds of a gateway its streams that ended first leave Redis, too."""
    path, body = REQUESTS["completion"]
    first.run(forget_all(shared_of(first)))
    for _ in range(11):
        assert first.post(path, body | {"max_tokens": 2}, headers=RESUMABLE).status_code == 200

    async def num_heads() -> int:
        client = Redis(port=redis.port)
        found = len(await client.keys("sluice:streams:*:head"))
        await client.aclose()
        return found

    wait_until(lambda: asyncio.run(num_heads()) == 8)
