"""Who may use a route, what its requests count as, and what is checked at the start."""

import re
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import SluiceError
from sluice.gateway.options.option import OptionError
from sluice.gateway.tenancy.access.identity import QuotaLimits
from tests.gateway.routes.serving import REFUSING, error_of, failing, routed_server, targets
from tests.pipelines.remote.remote_api import RemoteApi

PRICES = "rill: {prompt: 1.0, generated: 2.0}\nfar: {prompt: 100.0, generated: 100.0}\n"


async def test_a_key_needs_the_route_and_not_its_targets(start: Any) -> None:
    server = await start({"fast": targets("gone", "rill:polite")}, hosted={"gone": REFUSING})
    header = await server.make_key(models=("fast",), adapters=("none",))
    assert (await server.chat("fast", header)).headers["x-sluice-target"] == "rill:polite"
    refused = await server.chat("rill", header)
    assert refused.status_code == 404 or "may not use model 'rill'" in error_of(refused)
    listed = (await server.client.get("/v1/models", headers=header)).json()["data"]
    assert [each["id"] for each in listed] == ["fast"]
    other = await server.make_key(models=("rill",))
    refused = await server.chat("fast", other)
    assert (refused.status_code, error_of(refused)) == (403, "key 'key-2' may not use model 'fast'")
    assert "fast" not in [each["id"] for each in (await server.client.get("/v1/models", headers=other)).json()["data"]]


async def test_the_refusal_names_no_models_of_others(start: Any) -> None:
    flags = {"--model-control-mode": "explicit", "--load-model": ["gone"]}
    server = await start({"fast": targets("gone")}, local=("secret",), hosted={"gone": REFUSING}, flags=flags)
    (await server.client.post("/v2/repository/models/gone/unload")).raise_for_status()
    refused = await server.chat("fast", await server.make_key(models=("fast",)))
    assert (refused.status_code, error_of(refused)) == (
        503,
        "route 'fast': no target serves: gone: it is not served",
    )


async def test_a_row_has_the_target_that_answered_and_the_route(start: Any, api: RemoteApi, tmp_path: Path) -> None:
    (tmp_path / "prices.yaml").write_text(PRICES)
    api.answer = failing(500)
    flags = {"--price-table": str(tmp_path / "prices.yaml")}
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url}, flags=flags)
    used = (await server.chat("fast")).json()["usage"]
    await server.chat("rill")
    routed, direct = await server.rows()
    assert (routed["model"], routed["route"], routed["finish"]) == ("rill", "fast", "length")
    assert (direct["model"], direct["route"]) == ("rill", "")
    assert routed["generated_tokens"] == used["completion_tokens"] == 4
    assert routed["prompt_tokens"] == used["prompt_tokens"]
    assert routed["price_micros"] == direct["price_micros"] == used["prompt_tokens"] + 8


async def test_what_no_target_answered_is_a_failure_of_the_last(start: Any, api: RemoteApi) -> None:
    api.answer = failing(500)
    server = await start({"fast": targets("gone", "far")}, local=(), hosted={"far": api.url, "gone": REFUSING})
    assert (await server.chat("fast")).status_code == 503
    [row] = await server.rows()
    assert (row["model"], row["route"], row["finish"], row["status"]) == ("far", "fast", "unavailable", 503)
    assert row["prompt_tokens"] == row["generated_tokens"] == 0


async def test_a_quota_is_charged_once_however_many_targets_were_asked(start: Any, api: RemoteApi) -> None:
    api.answer = failing(500)
    server = await start({"fast": targets("far", "rill")}, hosted={"far": api.url})
    used = (await server.chat("rill")).json()["usage"]["total_tokens"]
    header = await server.make_key(limits=QuotaLimits(tokens_per_day=used + 40))
    answer = await server.chat("fast", header)
    assert answer.headers["x-sluice-attempts"] == "2"
    again = await server.chat("rill", header, max_tokens=1)
    left = int(again.headers["x-ratelimit-remaining-tokens"])
    assert left == 40 - (used - 4) - 1


async def test_a_sender_s_limit_is_no_failure_of_a_target(start: Any, api: RemoteApi) -> None:
    breaker = {"failures": 1}
    server = await start({"fast": targets("rill", "far", breaker=breaker)}, hosted={"far": api.url})
    header = await server.make_key(limits=QuotaLimits(tokens_per_day=3))
    refused = await server.chat("fast", header)
    assert refused.status_code == 429
    assert "limited to 3 tokens a day" in error_of(refused)
    assert await server.client.get("/v1/models/fast", headers=header)
    assert await server.metric('sluice_route_breaker_state{route="fast",target="rill"}') == 0
    assert not api.exchanges


# -- the start


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        ({"fast": targets("nobody")}, "route 'fast': targets[0].model must be a model that gives text or vectors, got"),
        ({"rill": targets("far")}, "route 'rill' must have a name that no model has"),
    ],
)
async def test_what_can_never_answer_is_an_error_at_the_start(
    tmp_path: Path, routes: dict[str, Any], message: str
) -> None:
    with pytest.raises(SluiceError, match="^" + re.escape("--routes: " + message)):
        async with routed_server(tmp_path, routes, hosted={"far": REFUSING}):
            pass


async def test_a_route_that_caches_needs_a_cache(tmp_path: Path) -> None:
    expected = "route 'fast': cache needs a response cache: --cache-config local,size=256000000, or redis"
    with pytest.raises(OptionError, match=re.escape(expected)):
        async with routed_server(tmp_path, {"fast": targets("rill", cache=True)}):
            pass
