"""Whose answers are kept for whom, where, and for how long."""

import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sluice.files import files_mark
from tests.gateway.routes.serving import (
    LOCAL_CACHE,
    REFUSING,
    RoutedServer,
    answering,
    failing,
    num_asked,
    routed_server,
    targets,
    text_of,
)
from tests.pipelines.remote.remote_api import Exchange, RemoteApi, chunk
from tests.serving.caching.parts import RedisServer


async def outcomes(server: RoutedServer, *headers: dict[str, str], model: str = "fast") -> list[str]:
    """Return what the cache says to one request with each of these headers."""
    answers = [await server.chat(model, header) for header in headers]
    assert all(each.status_code == 200 for each in answers), answers[-1].text
    return [each.headers.get("x-sluice-cache", "") for each in answers]


async def test_tenants_do_not_see_each_other_s_answers(start: Any) -> None:
    server = await start({"fast": targets("rill", cache=True)}, flags=LOCAL_CACHE)
    a1, a2, b = [await server.make_key(tenant=each) for each in ("a", "a", "b")]
    alone1, alone2 = [await server.make_key() for _ in range(2)]
    assert await outcomes(server, a1, b, a2, b, alone1, alone2, alone1) == [
        *("miss", "miss", "hit", "hit"),
        *("miss", "miss", "hit"),
    ]


async def test_a_shared_route_shares_them(start: Any) -> None:
    server = await start({"fast": targets("rill", cache="shared")}, flags=LOCAL_CACHE)
    a, b, alone = [await server.make_key(tenant=each) for each in ("a", "b", "")]
    assert await outcomes(server, a, b, alone) == ["miss", "hit", "hit"]


async def test_without_keys_the_tenants_that_requests_name_are_apart(start: Any) -> None:
    server = await start({"fast": targets("rill", cache=True)}, flags=LOCAL_CACHE)
    a, b = ({"x-sluice-tenant": each} for each in "ab")
    assert await outcomes(server, a, b, a, {}) == ["miss", "miss", "hit", "miss"]


async def test_a_key_may_want_its_answers_kept(start: Any) -> None:
    server = await start({"fast": targets("rill")}, flags=LOCAL_CACHE)
    keeps, plain = await server.make_key(tenant="a", caches=True), await server.make_key(tenant="a")
    assert await outcomes(server, keeps, keeps, plain, model="rill") == ["miss", "hit", ""]
    assert await outcomes(server, keeps, plain) == ["hit", ""], "the route's target is the same model"


async def test_a_hit_counts_as_a_request_without_tokens(start: Any) -> None:
    server = await start({"fast": targets("rill", cache=True)}, flags=LOCAL_CACHE)
    fresh, kept = [(await server.chat("fast")).json()["usage"] for _ in range(2)]
    assert fresh["completion_tokens"] == kept["completion_tokens"] == 4
    first, second = await server.rows()
    assert (first["finish"], first["generated_tokens"]) == ("length", 4)
    assert (second["finish"], second["model"], second["route"]) == ("cached", "rill", "fast")
    assert second["prompt_tokens"] == second["generated_tokens"] == second["price_micros"] == 0
    usage = (await server.client.get("/v1/usage", params={"group_by": "model"})).json()
    assert '"requests": 2' in str(usage).replace("'", '"')
    assert '"failed": 0' in str(usage).replace("'", '"')
    assert await server.metric('sluice_answer_cache_lookups_total{model="rill",outcome="hit"}') == 1
    assert await server.metric('sluice_answer_cache_lookups_total{model="rill",outcome="miss"}') == 1
    assert await server.metric('sluice_answer_cache_kept_bytes_total{model="rill"}') > 50
    assert await server.metric('sluice_route_requests_total{outcome="cached",route="fast",target="rill"}') == 1


async def test_answers_that_failed_are_not_kept(start: Any, api: RemoteApi) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(chunk("so far"))

    api.answer = die
    server = await start({"fast": targets("far", cache=True)}, local=(), hosted={"far": api.url}, flags=LOCAL_CACHE)
    assert (await server.chat("fast", stream=True)).headers["x-sluice-cache"] == "miss"
    api.answer = answering("whole")
    assert [text_of(await server.chat("fast")) for _ in range(2)] == ["whole", "whole"]
    assert num_asked(api) == 2


async def test_a_hosted_model_s_answer_comes_while_it_is_away(start: Any, api: RemoteApi) -> None:
    server = await start({"fast": targets("far", cache=True)}, local=(), hosted={"far": api.url}, flags=LOCAL_CACHE)
    assert text_of(await server.chat("fast")) == "from afar"
    api.answer = failing(500)
    assert text_of(await server.chat("fast")) == "from afar"
    assert (await server.chat("fast", max_tokens=5)).status_code == 503


async def test_targets_have_answers_of_their_own(start: Any, api: RemoteApi) -> None:
    api.answer = failing(500)
    server = await start({"fast": targets("far", "rill", cache=True)}, hosted={"far": api.url}, flags=LOCAL_CACHE)
    first = text_of(await server.chat("fast"))
    api.answer = answering("from afar")
    assert text_of(await server.chat("fast")) == "from afar" != first


async def test_adapters_have_answers_of_their_own(start: Any) -> None:
    routes = {name: targets(model, cache=True) for name, model in (("plain", "rill"), ("kind", "rill:polite"))}
    server = await start(routes, flags=LOCAL_CACHE)
    server.engines["rill"].adapter_marks["polite"] = "first files"
    found = [(await outcomes(server, {}, {}, model=each)) for each in ("plain", "kind")]
    assert found == [["miss", "hit"], ["miss", "hit"]]
    server.engines["rill"].adapter_marks["polite"] = "other files"
    assert await outcomes(server, {}, model="kind") == ["miss"]
    del server.engines["rill"].adapter_marks["polite"]
    assert await outcomes(server, {}, {}, model="kind") == ["", ""], "nobody knows what is loaded"


async def test_other_files_have_no_answers_of_the_last(start: Any, api: RemoteApi, tmp_path: Path) -> None:
    flags = {**LOCAL_CACHE, "--model-control-mode": "explicit", "--load-model": ["far"]}
    server = await start({"fast": targets("far", cache=True)}, local=(), hosted={"far": api.url}, flags=flags)
    config = tmp_path / "models" / "far" / "config.pbtxt"
    assert await outcomes(server, {}, {}) == ["miss", "hit"]
    (await server.client.post("/v2/repository/models/far/load")).raise_for_status()
    assert await outcomes(server, {}) == ["hit"], "the same files"
    config.write_text(config.read_text() + 'parameters { key: "model" value { string_value: "newer" } }')
    (await server.client.post("/v2/repository/models/far/load")).raise_for_status()
    assert await outcomes(server, {}) == ["miss"]


def test_the_mark_of_files_changes_with_them(tmp_path: Path) -> None:
    assert files_mark(tmp_path) == files_mark(tmp_path / "nothing") == ""
    weights = tmp_path / "sub" / "weights.bin"
    weights.parent.mkdir()
    weights.write_bytes(b"1234")
    first = files_mark(tmp_path)
    assert first == files_mark(tmp_path)
    os.utime(weights, ns=(1, 1))
    second = files_mark(tmp_path)
    weights.write_bytes(b"12345")
    os.utime(weights, ns=(1, 1))
    third = files_mark(tmp_path)
    weights.rename(tmp_path / "weights.bin")
    assert len({first, second, third, files_mark(tmp_path)}) == 4


# -- Redis


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    folder = tmp_path / "redis"
    folder.mkdir()
    server = RedisServer(folder)
    await server.start()
    yield server
    server.kill()


def in_redis(redis: RedisServer) -> dict[str, Any]:
    settings = (
        "host=127.0.0.1",
        f"port={redis.port}",
        "connect_timeout=5000",
        "socket_timeout=5000",
        "wait_timeout=5000",
    )
    return {"--cache-config": [f"redis,{each}" for each in settings]}


async def test_gateways_share_answers_in_redis(redis: RedisServer, tmp_path: Path, api: RemoteApi) -> None:
    routes = {"fast": targets("rill", cache=True), "hosted": targets("far", cache=True)}
    found = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        async with routed_server(tmp_path / name, routes, hosted={"far": api.url}, flags=in_redis(redis)) as server:
            found.append([*await outcomes(server, {}), *await outcomes(server, {}, model="hosted")])
    assert found == [["miss", "miss"], ["hit", "hit"]]
    assert num_asked(api) == 1


async def test_without_redis_models_answer(redis: RedisServer, start: Any) -> None:
    server = await start(
        {"fast": targets("gone", "rill", cache=True)}, hosted={"gone": REFUSING}, flags=in_redis(redis)
    )
    assert await outcomes(server, {}, {}) == ["miss", "hit"]
    redis.kill()
    for _ in range(3):
        assert text_of(await server.chat("fast")) == text_of(await server.chat("rill"))
