"""Routes of encoders: the first that can gives the vectors."""

from typing import Any

import httpx

from tests.gateway.routes.serving import LOCAL_CACHE, RoutedServer, error_of, failing, num_asked, targets
from tests.pipelines.remote.remote_api import RemoteApi, replying

VECTORS = replying({"data": [{"index": 0, "embedding": [0.6, 0.8]}]})
BREAKER = {"failures": 2, "open_s": 60, "max_open_s": 60}


async def embed(server: RoutedServer, path: str = "/v1/embeddings", **fields: Any) -> httpx.Response:
    return await server.client.post(path, json={"model": "vectors", "input": "some text", **fields})


async def begin(start: Any, api: RemoteApi, second_api: RemoteApi, **settings: Any) -> RoutedServer:
    """Serve a route of two encoders, of which the first fails."""
    api.answer, second_api.answer = failing(500), VECTORS
    hosted = {"far": api.url, "farther": second_api.url}
    routes = {"vectors": targets("far", "farther", breaker=BREAKER, **settings)}
    server: RoutedServer = await start(routes, local=(), hosted=hosted, endpoint="embeddings", flags=LOCAL_CACHE)
    return server


async def test_one_that_fails_is_passed_over_and_left_alone(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    server = await begin(start, api, second_api)
    answers = [await embed(server) for _ in range(3)]
    assert [each.json()["data"][0]["embedding"] for each in answers] == [[0.6, 0.8]] * 3, answers[0].text
    assert [each.headers["x-sluice-attempts"] for each in answers] == ["2", "2", "1"]
    assert {each.headers["x-sluice-target"] for each in answers} == {"farther"}
    assert num_asked(api) == 2
    assert await server.breaker("vectors", "far") == "open"
    [row, *_] = await server.rows()
    assert (row["model"], row["route"]) == ("farther", "vectors")


async def test_other_routes_of_vectors_take_them(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    server = await begin(start, api, second_api)
    assert (await embed(server, "/pooling")).headers["x-sluice-target"] == "farther"
    answer = await embed(server, "/api/embed")
    assert answer.json()["embeddings"] == [[0.6, 0.8]], answer.text
    listed = (await server.client.get("/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["far", "farther", "vectors"]


async def test_kept_vectors_ask_nobody(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    server = await begin(start, api, second_api, cache=True)
    answers = [await embed(server) for _ in range(2)]
    assert [each.headers["x-sluice-cache"] for each in answers] == ["miss", "hit"]
    assert num_asked(second_api) == 1
    rows = await server.rows()
    assert [each["finish"] for each in rows] == ["", "cached"]


async def test_all_failed_says_what_each_said(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    server = await begin(start, api, second_api)
    second_api.answer = failing(503, "closed for today")
    refused = await embed(server)
    assert refused.status_code == 503
    assert error_of(refused).startswith("route 'vectors': no target answered: far: ")
    assert "closed for today" in error_of(refused)


async def test_a_route_of_vectors_gives_no_text(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    server = await begin(start, api, second_api)
    refused = await server.chat("vectors")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "far: it gives embeddings and no text" in error_of(refused)


async def test_a_route_of_text_gives_no_vectors(start: Any) -> None:
    server = await start({"vectors": targets("rill")})
    refused = await embed(server)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    assert "model 'rill' has no embeddings" in error_of(refused)
