"""Against a real redis-server, which the tests freeze, kill and start again."""

import asyncio
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis

from sluice.errors import ErrorCode
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.caching import open_cache
from sluice.serving.caching.redis_cache import RedisCache
from sluice.serving.caching.settings import RedisCacheSettings, RedisTls
from sluice.serving.instance import Instance
from sluice.serving.model import infer_one
from sluice.serving.statistics import FailureReason
from tests.paths import CERTIFICATES
from tests.serving.batching.parts import AtOnceInstance, Client, HeldInstance, request, turns
from tests.serving.caching.parts import RedisServer, cached_model, is_prepared
from tests.waiting import PATIENCE_S, until

RETRY_S = 0.02


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.fixture
async def redis(server: RedisServer) -> AsyncIterator["Redis"]:
    """A running server, and a client of it that knows nothing of Sluice."""
    await server.start()
    async with Redis(port=server.port) as client:
        yield client


class Caches:
    """Opens caches and models for a test, and closes them after it."""

    def __init__(self, server: RedisServer, stack: AsyncExitStack) -> None:
        self._server = server
        self._stack = stack

    def open(self, **settings: object) -> RedisCache:
        known = {"host": "127.0.0.1", "port": self._server.port, "retry_s": RETRY_S, "socket_timeout_s": 0.5}
        cache = open_cache(RedisCacheSettings(**(known | settings)))  # type: ignore[arg-type]
        assert isinstance(cache, RedisCache)
        self._stack.push_async_callback(cache.close)
        return cache

    async def model(
        self, instance: Instance, *, extra: str = "", **settings: object
    ) -> tuple[RedisCache, ScheduledModel]:
        """Open a cache and a model that uses it, once it can."""
        cache = self.open(**settings)
        model = cached_model(cache, instance, extra=extra)
        await is_prepared(cache)
        return cache, model


@pytest.fixture
async def caches(server: RedisServer) -> AsyncIterator[Caches]:
    async with AsyncExitStack() as stack:
        yield Caches(server, stack)


async def ask(model: ScheduledModel, name: str = "a", width: int = 1) -> bytes:
    response = await infer_one(model, request(name, width=width))
    assert response.id == name
    return bytes(response.outputs[0].raw)


async def kept(redis: "Redis", num: int) -> None:
    async def are_kept() -> bool:
        return await redis.dbsize() >= num

    await until(are_kept)


async def only_key(redis: "Redis") -> bytes:
    (key,) = await redis.keys("*")
    assert isinstance(key, bytes)
    return key


async def test_gateways_share_what_one_of_them_has_computed(caches: Caches, redis: "Redis") -> None:
    stores = [caches.open(ttl_s=60) for _ in range(2)]
    first, second = (cached_model(store, AtOnceInstance()) for store in stores)
    await is_prepared(*stores)
    answer = await ask(first)
    await kept(redis, 1)
    await until(lambda: first.statistics.infer.cache_miss.count == 1)
    assert await ask(second, "b") == answer
    statistics = second.statistics
    assert (statistics.infer.success.count, statistics.infer.cache_hit.count, statistics.execution_count) == (1, 1, 0)
    assert second.num_in_flight == 0
    key = await only_key(redis)
    assert key.startswith(b"sluice:echo:1:")
    assert 0 < await redis.ttl(key) <= 60


async def test_a_model_with_other_files_shares_nothing(caches: Caches, redis: "Redis", tmp_path: Path) -> None:
    cache = caches.open()
    (tmp_path / "1").mkdir()
    for content in ("old", "new"):
        (tmp_path / "1" / "model.bin").write_text(content)
        model = cached_model(cache, AtOnceInstance(), folder=tmp_path)
        await is_prepared(cache)
        await ask(model)
        assert model.statistics.infer.cache_hit.count == 0
    await kept(redis, 2)


async def test_a_redis_that_dies_costs_nothing_and_comes_back(
    caches: Caches, redis: "Redis", server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    cache, model = await caches.model(AtOnceInstance())
    await ask(model)
    await kept(redis, 1)
    with caplog.at_level(logging.WARNING):
        server.kill()
        for number in range(10):
            await ask(model, f"dead{number}")
        await until(lambda: not cache.usage.is_up)
        errors = cache.usage.num_errors
        await until(lambda: cache.usage.num_errors > errors + 2)
        answered: list[str] = []
        model.submit(request("at once"), lambda response: answered.append(response.id))
        assert answered == ["at once"]
        await server.start()
        await until(lambda: cache.usage.is_up)
    messages = [record.message for record in caplog.records if "response cache" in record.message]
    assert len(messages) == 2
    assert "is not available, requests are served without it" in messages[0]
    assert "answers again" in messages[1]
    await ask(model, "b")
    await until(lambda: model.statistics.infer.cache_miss.count == 2)
    await ask(model, "c")
    assert model.statistics.infer.cache_hit.count == 1
    assert model.statistics.infer.fail.count == 0
    assert cache.usage.num_bypassed >= 8


async def test_under_load_nobody_notices_that_redis_goes_and_comes(
    caches: Caches, redis: "Redis", server: RedisServer
) -> None:
    cache, model = await caches.model(AtOnceInstance(), socket_timeout_s=0.1)
    is_over = asyncio.Event()

    async def client(number: int) -> int:
        count = 0
        while not is_over.is_set():
            width = (number + count) % 7 + 1
            assert len(await ask(model, f"{number}-{count}", width)) == 4 * width
            count += 1
            await asyncio.sleep(0)
        return count

    clients = [asyncio.create_task(client(number)) for number in range(8)]
    for _ in range(2):
        server.kill()
        await until(lambda: not cache.usage.is_up)
        hits = model.statistics.infer.cache_hit.count
        await server.start()
        await until(lambda hits=hits: model.statistics.infer.cache_hit.count > hits)
    is_over.set()
    total = sum(await asyncio.gather(*clients))
    infer = model.statistics.infer
    assert (infer.success.count, infer.fail.count) == (total, 0)
    assert model.num_in_flight == 0


async def test_a_redis_that_hangs_holds_nobody_up_for_long(caches: Caches, redis: "Redis", server: RedisServer) -> None:
    cache, model = await caches.model(AtOnceInstance(), socket_timeout_s=0.05)
    server.signal(signal.SIGSTOP)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(ask(model, f"{number}", width=number) for number in range(1, 200)))
        for number in range(2):
            await ask(model, f"late{number}")
        await until(lambda: not cache.usage.is_up)
        assert model.statistics.infer.success.count == 201
    finally:
        server.signal(signal.SIGCONT)
    await until(lambda: cache.usage.is_up)


async def test_a_password(caches: Caches, tmp_path: Path, server: RedisServer) -> None:
    locked = RedisServer(tmp_path, "--requirepass", "secret")
    await locked.start()
    try:
        wrong, right = (caches.open(port=locked.port, password=each) for each in ("guess", "secret"))
        await until(lambda: right.is_up and wrong.usage.num_errors > 0)
        assert not wrong.is_up
    finally:
        await right.close()
        locked.kill()


async def test_tls(caches: Caches, redis: "Redis", server: RedisServer) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=CERTIFICATES / "ca.pem")
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(CERTIFICATES / "server.pem", CERTIFICATES / "server.key")
    async with tls_in_front_of(server.port, context) as port:
        files = {"cert": "client.pem", "key": "client.key", "cacert": "ca.pem"}
        tls = RedisTls(**{name: str(CERTIFICATES / file) for name, file in files.items()})
        cache = caches.open(host="localhost", port=port, tls=tls)
        stranger = caches.open(host="localhost", port=port, tls=RedisTls())
        await until(lambda: cache.is_up and stranger.usage.num_errors > 0)
        assert await cache.keep("k", b"v")
        assert await cache.find("k") == b"v"
        assert not stranger.is_up
        await asyncio.gather(cache.close(), stranger.close())


@asynccontextmanager
async def tls_in_front_of(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """The port of one that decrypts for the server on `port`, which was built without."""

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pipe(reader, to_writer), pipe(to_reader, writer), return_exceptions=True)

    front = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    async with front:
        yield front.sockets[0].getsockname()[1]


@pytest.mark.parametrize("is_list", [False, True])
async def test_what_others_put_there_is_a_miss(caches: Caches, redis: "Redis", is_list: bool) -> None:
    cache, model = await caches.model(AtOnceInstance())
    answer = await ask(model)
    await kept(redis, 1)
    key = await only_key(redis)
    await redis.delete(key)
    await (redis.rpush(key, b"hello") if is_list else redis.set(key, b"hello"))
    assert await ask(model, "b") == answer
    await until(lambda: model.statistics.infer.cache_miss.count == 2)
    assert await ask(model, "c") == answer
    assert (cache.usage.num_misses, cache.usage.num_hits) == (2, 1)


async def test_a_large_response_is_not_kept(caches: Caches, redis: "Redis") -> None:
    _, model = await caches.model(AtOnceInstance(), max_value_bytes=100)
    await ask(model, width=26)
    await ask(model, width=25)
    await kept(redis, 1)
    await until(lambda: model.statistics.infer.cache_miss.count == 1)
    assert await redis.dbsize() == 1


async def test_look_ups_of_one_moment_travel_together(caches: Caches, redis: "Redis") -> None:
    _, model = await caches.model(AtOnceInstance())
    await asyncio.gather(*(ask(model, f"{width}", width=width) for width in range(1, 61)))
    await kept(redis, 60)
    calls = await redis.info("commandstats")
    assert calls["cmdstat_mget"]["calls"] <= 4
    assert calls["cmdstat_set"]["calls"] == 60


async def test_a_request_that_is_cancelled_meanwhile_ends_at_once(
    caches: Caches, redis: "Redis", server: RedisServer
) -> None:
    held = HeldInstance()
    client = Client((await caches.model(held))[1])
    server.signal(signal.SIGSTOP)
    job = client.submit("a")
    assert client.model.statistics.count_pending() == 1
    job.cancel()
    assert job.is_finished
    assert client.model.num_in_flight == 0
    assert client.model.statistics.count_pending() == 0
    assert client.model.statistics.failures[FailureReason.CANCELED] == 1
    server.signal(signal.SIGCONT)
    client.submit("b")
    await until(lambda: held.is_running)
    assert held.ids == [["b"]]
    held.finish()


async def test_a_model_that_is_closed_meanwhile_fails_what_waits(
    caches: Caches, redis: "Redis", server: RedisServer
) -> None:
    client = Client((await caches.model(AtOnceInstance()))[1])
    server.signal(signal.SIGSTOP)
    client.submit("a")
    await client.model.close()
    assert client.errors["a"].code is ErrorCode.UNAVAILABLE
    server.signal(signal.SIGCONT)


async def test_a_full_queue_refuses_after_the_look_up(caches: Caches, redis: "Redis") -> None:
    queue = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    held = HeldInstance()
    client = Client((await caches.model(held, extra=queue))[1])
    client.submit("a")
    await until(lambda: held.is_running)
    for number in (2, 3):
        client.submit(f"{number}", width=number)
    await until(lambda: "3" in client.errors)
    assert client.errors["3"].code is ErrorCode.UNAVAILABLE
    assert client.model.statistics.failures[FailureReason.REJECTED] == 1
    held.finish()
    await until(lambda: held.is_running)
    held.finish()
    assert client.model.num_in_flight == 0


async def test_responses_keep_their_order(caches: Caches, redis: "Redis") -> None:
    held = HeldInstance()
    client = Client((await caches.model(held, extra="dynamic_batching { preserve_ordering: true }"))[1])
    client.submit("known")
    await until(lambda: held.is_running)
    held.finish()
    await kept(redis, 1)
    client.submit("new", width=2)
    client.submit("hit")
    await until(lambda: held.is_running)
    await until(lambda: client.model.statistics.infer.cache_hit.count == 1)
    assert client.answered == ["known"]
    held.finish()
    assert client.answered == ["known", "new", "hit"]


async def test_a_closed_cache_answers_nothing_and_waits_for_nobody(caches: Caches, redis: "Redis") -> None:
    cache = caches.open()
    await until(lambda: cache.is_up)
    waiting = cache.find("k")
    await cache.close()
    await cache.close()
    assert await waiting is None
    assert await cache.find("k") is None
    assert not await cache.keep("k", b"v")


async def test_closing_ends_what_hangs(caches: Caches, redis: "Redis", server: RedisServer) -> None:
    cache = caches.open(socket_timeout_s=60)
    await until(lambda: cache.is_up)
    server.signal(signal.SIGSTOP)
    try:
        under_way, waiting = cache.find("k"), cache.keep("k", b"v")
        await turns(10)
        async with asyncio.timeout(PATIENCE_S):
            await cache.close()
        assert await under_way is None
        assert not await waiting
    finally:
        server.signal(signal.SIGCONT)


async def test_what_waits_for_redis_has_a_bound(caches: Caches, redis: "Redis") -> None:
    cache = caches.open(wait_timeout_s=20.0, socket_timeout_s=20.0)
    await until(lambda: cache.is_up)
    value = bytes(1 << 20)
    kept_ones = await asyncio.gather(*(cache.keep(f"{number}", value) for number in range(66)))
    assert kept_ones == [True] * 64 + [False] * 2
    assert await cache.keep("more", value)
