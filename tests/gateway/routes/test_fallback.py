"""Which target of a route answers: in order, past those that fail, are ill, or have too short a context."""

from pathlib import Path
from typing import Any

import openai
import pytest

from sluice.pipelines.routes.target import CircuitBreaker
from tests.gateway.routes.serving import (
    PROMPT,
    QUICK,
    REFUSING,
    answering,
    error_of,
    failing,
    num_asked,
    routed_server,
    targets,
    text_of,
)
from tests.pipelines.remote.remote_api import Answer, Exchange, HeldAnswer, RemoteApi, chunk


async def test_the_first_target_answers_as_without_a_route(start: Any, api: RemoteApi) -> None:
    server = await start({"fast": targets("rill", "far")}, hosted={"far": api.url})
    direct, routed = await server.chat("rill"), await server.chat("fast")
    assert text_of(direct) == text_of(routed)
    assert routed.json()["model"] == "fast"
    assert (routed.headers["x-sluice-target"], routed.headers["x-sluice-attempts"]) == ("rill", "1")
    assert "x-sluice-target" not in direct.headers
    assert direct.json()["usage"]["completion_tokens"] == routed.json()["usage"]["completion_tokens"]
    assert num_asked(api) == 0


async def dropping(exchange: Exchange) -> None:
    """End without an answer: the connection breaks off."""


FAILURES: dict[str, Answer] = {
    "500": failing(500),
    "429": failing(429, headers={"retry-after": "30"}),
    "503": failing(503),
    "404": failing(404),
    "key": failing(401),
    "timeout": failing(504),
    "broken": dropping,
}


async def test_what_cannot_answer_is_passed_over(start: Any, api: RemoteApi) -> None:
    route = targets("far", "rill", breaker={"failures": 1000})
    server = await start({"fast": route}, hosted={"far": api.url})
    own = text_of(await server.chat("rill"))
    for num, (failure, api.answer) in enumerate(FAILURES.items(), 1):
        whole, streamed = await server.chat("fast"), await server.chat("fast", stream=True)
        for answer in (whole, streamed):
            assert answer.status_code == 200, (failure, answer.text)
            assert (answer.headers["x-sluice-target"], answer.headers["x-sluice-attempts"]) == ("rill", "2"), failure
        assert text_of(whole) == own
        assert num_asked(api) == 2 * num, failure
    outcomes = next(iter(server.server.plane.routes)).targets[0].outcomes
    assert sum(outcomes.values()) == 2 * len(FAILURES) and len(outcomes) > 1
    for outcome, count in outcomes.items():
        sample = f'sluice_route_requests_total{{outcome="{outcome}",route="fast",target="far"}}'
        assert await server.metric(sample) == count
    answered = await server.metric('sluice_route_requests_total{outcome="ok",route="fast",target="rill"}')
    assert answered == 2 * len(FAILURES)


async def test_a_silent_target_is_left_after_its_timeout(start: Any, api: RemoteApi) -> None:
    held = HeldAnswer(answering("late"))
    api.answer = held
    route = {"targets": [{"model": "far", "timeout_s": 0.1}, {"model": "rill"}], **QUICK}
    server = await start({"fast": route}, hosted={"far": api.url})
    answer = await server.chat("fast")
    assert answer.headers["x-sluice-target"] == "rill"
    await held.wait(left=1)


async def test_nothing_is_tried_again_after_the_first_event(start: Any, api: RemoteApi) -> None:
    async def die(exchange: Exchange) -> None:
        await exchange.begin()
        await exchange.event(chunk("so far"))

    api.answer = die
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url})
    answer = await server.chat("fast", stream=True)
    assert "so far" in answer.text
    assert "broke off" in answer.text and "[DONE]" not in answer.text
    assert not server.engines["rill"].requests
    assert await server.metric('sluice_route_requests_total{outcome="unavailable",route="fast",target="far"}') == 1


async def test_a_request_at_fault_is_refused_at_once(start: Any, api: RemoteApi) -> None:
    api.answer = failing(400, "temperature is bad", param="temperature")
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url})
    refused = await server.chat("fast")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
    assert not server.engines["rill"].requests
    assert await server.breaker("fast", "far") == "closed"


async def test_all_failed_says_what_each_target_said(start: Any, api: RemoteApi, second_api: RemoteApi) -> None:
    api.answer, second_api.answer = failing(500, "first is down"), failing(429, "slow down", {"retry-after": "7"})
    hosted = {"far": api.url, "farther": second_api.url}
    server = await start({"fast": targets("far", "farther")}, local=(), hosted=hosted)
    refused = await server.chat("fast")
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "7")
    assert error_of(refused).startswith("route 'fast': no target answered: far: ")
    assert "first is down" in error_of(refused) and "slow down" in error_of(refused)


async def test_retries_begin_anew_after_the_last_target(start: Any, api: RemoteApi) -> None:
    answers = [failing(500), failing(500), answering("at last")]

    async def answer_next(exchange: Exchange) -> None:
        await answers.pop(0)(exchange)

    api.answer = answer_next
    server = await start({"fast": targets("far", retries=2)}, local=(), hosted={"far": api.url})
    answer = await server.chat("fast")
    assert (text_of(answer), answer.headers["x-sluice-attempts"]) == ("at last", "3")


async def test_retries_have_an_end(start: Any, api: RemoteApi) -> None:
    api.answer = failing(500)
    routes = {"once": targets("far", retries=0), "twice": targets("far", retries=1)}
    server = await start(routes, local=(), hosted={"far": api.url})
    for route, asked in (("once", 1), ("twice", 1 + 2)):
        assert (await server.chat(route)).status_code == 503
        assert num_asked(api) == asked


async def test_a_target_that_wants_to_be_left_alone_is(start: Any, api: RemoteApi) -> None:
    api.answer = failing(429, headers={"retry-after": "30"})
    server = await start({"fast": targets("far", retries=5)}, local=(), hosted={"far": api.url})
    assert (await server.chat("fast")).status_code == 429
    assert num_asked(api) == 1


async def test_the_request_s_own_deadline_counts_for_all_attempts(start: Any, api: RemoteApi) -> None:
    held = HeldAnswer(answering("late"))
    api.answer = held
    server = await start({"fast": targets("far", retries=50)}, local=(), hosted={"far": api.url})
    refused = await server.chat("fast", {"x-sluice-timeout-ms": "300"})
    assert refused.status_code == 504
    assert num_asked(api) == 1


# -- contexts


async def test_what_is_too_long_falls_forward_without_being_asked(start: Any) -> None:
    server = await start(
        {"fast": targets("small", "large")}, local=("small", "large"), num_tokens={"small": 64, "large": 1024}
    )
    short = await server.chat("fast")
    assert short.headers["x-sluice-target"] == "small"
    num_requests = len(server.engines["small"].requests)
    answer = await server.chat("fast", max_tokens=100)
    assert (answer.headers["x-sluice-target"], answer.headers["x-sluice-attempts"]) == ("large", "1")
    assert len(server.engines["small"].requests) == num_requests
    too_long = await server.chat("fast", max_tokens=5000)
    assert (too_long.status_code, too_long.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_hosted_model_s_context_is_learned_from_its_refusal(start: Any, api: RemoteApi) -> None:
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url})
    of_openai = failing(400, "too long", code="context_length_exceeded")
    for api.answer in (of_openai, failing(400, "the maximum context length is 5")):
        answer = await server.chat("fast")
        assert (answer.headers["x-sluice-target"], answer.headers["x-sluice-attempts"]) == ("rill", "2")
        assert await server.breaker("fast", "far") == "closed"


async def test_another_sluice_is_a_target_and_says_what_is_too_long(start: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    async with routed_server(tmp_path / "other", {}, local=("far",), num_tokens={"far": 64}) as other:
        server = await start({"fast": targets("far", "rill")}, hosted={"far": f"{other.url}/v1"})
        answer = await server.chat("fast")
        assert answer.headers["x-sluice-target"] == "far"
        assert text_of(answer) == text_of(await other.chat("far"))
        longer = await server.chat("fast", max_tokens=200)
        assert (longer.headers["x-sluice-target"], longer.headers["x-sluice-attempts"]) == ("rill", "2")


# -- circuit breakers


async def test_a_breaker_opens_is_passed_over_and_closes(
    start: Any, api: RemoteApi, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(CircuitBreaker.__init__, "__defaults__", (lambda: now_s,))
    api.answer = failing(500)
    breaker = {"failures": 2, "open_s": 20, "max_open_s": 20}
    server = await start({"fast": targets("far", "rill", breaker=breaker)}, hosted={"far": api.url})
    for _ in range(4):
        assert (await server.chat("fast")).headers["x-sluice-target"] == "rill"
    assert num_asked(api) == 2
    assert await server.breaker("fast", "far") == "open"
    assert await server.metric('sluice_route_breaker_state{route="fast",target="far"}') == 2
    api.answer = answering("well again")
    now_s = 20.0
    assert await server.breaker("fast", "far") == "half_open"
    assert text_of(await server.chat("fast")) == "well again"
    assert await server.metric('sluice_route_breaker_state{route="fast",target="far"}') == 0


async def test_where_all_breakers_are_open_one_target_is_asked(start: Any, api: RemoteApi) -> None:
    api.answer = failing(500)
    breaker = {"failures": 1, "open_s": 60, "max_open_s": 60}
    server = await start({"fast": targets("far", breaker=breaker)}, local=(), hosted={"far": api.url})
    assert (await server.chat("fast")).status_code == 503
    assert await server.breaker("fast", "far") == "open"
    api.answer = answering("well again")
    assert text_of(await server.chat("fast")) == "well again"
    assert await server.breaker("fast", "far") == "closed"


# -- weights


async def test_a_session_stays_with_its_target(start: Any) -> None:
    weighted = {"targets": [{"model": "a"}, {"model": "b"}], "choose": "weighted", **QUICK}
    server = await start({"fast": weighted}, local=("a", "b"))
    seen = set()
    for number in range(12):
        answers = [await server.chat("fast", max_tokens=1, prompt_cache_key=f"user {number}") for _ in range(2)]
        chosen = {each.headers["x-sluice-target"] for each in answers}
        assert len(chosen) == 1
        seen |= chosen
    assert seen == {"a", "b"}


async def test_a_weight_of_0_is_for_need_alone(start: Any, api: RemoteApi) -> None:
    weighted = {"targets": [{"model": "far", "weight": 0}, {"model": "rill"}], "choose": "weighted", **QUICK}
    server = await start({"fast": weighted}, hosted={"far": api.url})
    for _ in range(10):
        assert (await server.chat("fast", max_tokens=1)).headers["x-sluice-target"] == "rill"


# -- protocols and kinds of models


async def test_an_adapter_is_a_target(start: Any) -> None:
    server = await start({"kind": targets("rill:polite")})
    assert (await server.chat("kind")).headers["x-sluice-target"] == "rill:polite"
    assert server.engines["rill"].asked.adapter == "polite"


TURNS: list[Any] = [{"role": "user", "content": PROMPT}]
OLLAMA = {"options": {"num_predict": 3}, "stream": False}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 3},
    "/v1/responses": {"input": PROMPT, "max_output_tokens": 16, "store": False},
    "/v1/messages": {"messages": TURNS, "max_tokens": 3},
    "/api/chat": {"messages": TURNS, **OLLAMA},
    "/api/generate": {"prompt": PROMPT, **OLLAMA},
}


async def test_every_protocol_and_stock_clients_take_routes(start: Any) -> None:
    """The connection to the first target is refused."""
    server = await start({"fast": targets("gone", "rill")}, hosted={"gone": REFUSING})
    for path, body in BODIES.items():
        answer = await server.client.post(path, json={"model": "fast", **body})
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-sluice-target"] == "rill", path
        assert '"fast' in answer.text
    listed = (await server.client.get("/api/tags")).json()["models"]
    assert "fast:latest" in [each["name"] for each in listed]
    shown = await server.client.post("/api/show", json={"model": "fast:latest"})
    assert shown.status_code == 200, shown.text
    assert "completion" in shown.json()["capabilities"]
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        raw = await client.chat.completions.with_raw_response.create(
            model="fast",
            messages=TURNS,
            max_tokens=4,
            temperature=0,
        )
        assert raw.headers["x-sluice-target"] == "rill"
        assert raw.parse().choices[0].message.content == text_of(await server.chat("rill"))
        assert [each.id async for each in client.models.list()] == [
            "gone",
            "rill",
            "rill:french",
            "rill:polite",
            "fast",
        ]


async def test_choices_of_one_request_are_all_there(start: Any, api: RemoteApi) -> None:
    api.answer = failing(500)
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url})
    answer = await server.chat("fast", n=3, seed=1, temperature=1)
    direct = await server.chat("rill", n=3, seed=1, temperature=1)
    assert [each["message"] for each in answer.json()["choices"]] == [
        each["message"] for each in direct.json()["choices"]
    ]
    assert answer.headers["x-sluice-target"] == "rill"


async def test_a_target_that_is_unloaded_is_passed_over(start: Any, api: RemoteApi) -> None:
    flags = {"--model-control-mode": "explicit", "--load-model": ["far"]}
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url}, flags=flags)
    assert text_of(await server.chat("fast")) == "from afar"
    (await server.client.post("/v2/repository/models/far/unload")).raise_for_status()
    assert (await server.chat("fast")).headers["x-sluice-target"] == "rill"
    (await server.client.post("/v2/repository/models/far/load")).raise_for_status()
    assert text_of(await server.chat("fast")) == "from afar"
