"""A second target is asked where the first is silent, and the slower one ends at once."""

import asyncio
from typing import Any

import pytest

from tests.gateway.routes.serving import answering, failing, num_asked, targets, text_of
from tests.pipelines.remote.remote_api import HeldAnswer, RemoteApi
from tests.waiting import until

HEDGED = {"hedge_after_ms": 50, "hedge_max_tokens": 16}


async def test_the_second_wins_and_the_first_ends_at_once(start: Any, api: RemoteApi) -> None:
    held = HeldAnswer(answering("late"))
    api.answer = held
    server = await start({"fast": targets("far", "rill", **HEDGED)}, hosted={"far": api.url})
    answer = await server.chat("fast")
    assert (answer.headers["x-sluice-target"], answer.headers["x-sluice-attempts"]) == ("rill", "2")
    assert text_of(answer) == text_of(await server.chat("rill"))
    await held.wait(left=1)
    await server.server.plane.wait_idle(10)
    assert await server.metric('sluice_route_hedges_total{outcome="won",route="fast"}') == 1
    assert await server.metric('sluice_route_requests_total{outcome="cancelled",route="fast",target="far"}') == 1
    assert await server.breaker("fast", "far") == "closed"


async def test_a_short_answer_to_anthropic_s_clients_is_hedged(start: Any, api: RemoteApi) -> None:
    api.answer = HeldAnswer(answering("late"))
    server = await start({"fast": targets("far", "rill", **HEDGED)}, hosted={"far": api.url})
    body = {"model": "fast", "messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
    answer = await server.client.post("/v1/messages", json=body)
    assert (answer.status_code, answer.headers["x-sluice-target"]) == (200, "rill")


async def test_the_loser_s_blocks_are_freed(start: Any, api: RemoteApi) -> None:
    held = HeldAnswer(answering("x"))
    server = await start({"fast": targets("slow", "far", **HEDGED)}, local=("slow",), hosted={"far": api.url})
    api.answer = held
    server.runners["slow"].hold_after(0)
    asking = asyncio.create_task(server.chat("fast"))
    await held.wait(come=1)
    await asyncio.to_thread(server.runners["slow"].wait_held)
    held.release()
    assert text_of(await asking) == "x"
    server.runners["slow"].release()
    await until(lambda: server.engines["slow"].stats.num_running == 0)
    await server.chat("slow", max_tokens=1)  # the engine takes it after all earlier commands, and reports
    await until(lambda: server.engines["slow"].stats.num_blocks_used == 0)
    [first, _] = server.engines["slow"].requests
    assert first.sampling.max_tokens == 4
    assert await server.metric('sluice_requests_total{model="slow",outcome="cancelled",protocol="openai_chat"}') == 1


async def test_the_first_may_still_win(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    first, second = HeldAnswer(answering("first")), HeldAnswer(answering("second"))
    api.answer, second_api.answer = first, second
    hosted = {"far": api.url, "farther": second_api.url}
    server = await start({"fast": targets("far", "farther", **HEDGED)}, local=(), hosted=hosted)
    asking = asyncio.create_task(server.chat("fast"))
    await second.wait(come=1)
    first.release()
    answer = await asking
    assert (text_of(answer), answer.headers["x-sluice-attempts"]) == ("first", "1")
    await second.wait(left=1)
    assert await server.metric('sluice_route_hedges_total{outcome="lost",route="fast"}') == 1


async def test_where_both_fail_the_next_is_asked(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    first, second = HeldAnswer(failing(500)), HeldAnswer(failing(503))
    api.answer, second_api.answer = first, second
    hosted = {"far": api.url, "farther": second_api.url}
    server = await start({"fast": targets("far", "farther", "rill", **HEDGED)}, hosted=hosted)
    asking = asyncio.create_task(server.chat("fast"))
    await second.wait(come=1)
    first.release()
    second.release()
    answer = await asking
    assert (answer.headers["x-sluice-target"], answer.headers["x-sluice-attempts"]) == ("rill", "3")


@pytest.mark.parametrize("max_tokens", [17, None])
async def test_long_requests_are_not_hedged(start: Any, api: RemoteApi, max_tokens: int | None) -> None:
    held = HeldAnswer(answering("in its own time"))
    api.answer = held
    server = await start({"fast": targets("far", "rill", **HEDGED)}, hosted={"far": api.url})
    asking = asyncio.create_task(server.chat("fast", max_tokens=max_tokens))
    await held.wait(come=1)
    await asyncio.sleep(0.1)  # longer than hedge_after_ms: a second target would have been asked
    held.release()
    assert text_of(await asking) == "in its own time"
    assert not server.engines["rill"].requests


async def test_a_client_who_leaves_ends_both(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    first, second = HeldAnswer(answering("first")), HeldAnswer(answering("second"))
    api.answer, second_api.answer = first, second
    hosted = {"far": api.url, "farther": second_api.url}
    server = await start({"fast": targets("far", "farther", **HEDGED)}, local=(), hosted=hosted)
    asking = asyncio.create_task(server.chat("fast", stream=True))
    await second.wait(come=1)
    asking.cancel()
    await first.wait(left=1)
    await second.wait(left=1)
    assert await server.server.plane.wait_idle(10)
    assert num_asked(api) == num_asked(second_api) == 1
