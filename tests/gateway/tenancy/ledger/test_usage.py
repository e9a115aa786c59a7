"""GET /v1/usage: sums, and who may see which."""

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from sluice.cli.usage import command
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import make_key
from sluice.gateway.tenancy.ledger.ledger import CallLedger
from sluice.gateway.tenancy.ledger.prices import PriceTable
from sluice.gateway.tenancy.ledger.rows import LedgerRow, today
from sluice.gateway.tenancy.ledger.store import open_ledger
from tests.gateway.front.http.live import MODEL, LiveServer, live_server
from tests.gateway.tenancy.ledger.test_stores import batch, row

INFERENCE = frozenset({RouteGroup.INFERENCE})
KEYS = {
    "admin": make_key(Identity(name="admin", groups=frozenset({RouteGroup.ADMIN}))),
    "alone": make_key(Identity(name="alone", groups=INFERENCE)),
    "one": make_key(Identity(name="one", tenant="team", groups=INFERENCE)),
    "two": make_key(Identity(name="two", tenant="team", groups=INFERENCE)),
}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    store = open_ledger(str(tmp_path_factory.mktemp("ledger") / "ledger.sqlite"))
    ledger = CallLedger(store, PriceTable(), only_known=True)
    with live_server(ledger=ledger) as live:
        live.server.accounts.calls.observe(ledger, only_known=True)
        live.server.rooms.join(close=ledger.close)
        day = today() - timedelta(days=40)
        identity = KEYS["alone"].stored.identity
        live.run(store.write(batch([row(day, identity.key_id, key_name="old name")])))
        live.post("/v1/completions", {"model": MODEL, "prompt": "nobody", "max_tokens": 1})
        live.server.accounts.calls.access.ring.keep(each.stored for each in KEYS.values())
        for name in ("alone", "one", "two", "two"):
            body = {"model": MODEL, "prompt": "a b", "max_tokens": 2}
            assert live.post("/v1/completions", body, headers=sent(name)).status_code == 200
        live.run(ledger.flush())
        yield live


def sent(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name].text}"}


def usage(live: LiveServer, name: str, **params: Any) -> dict[str, Any]:
    answer = live.get("/v1/usage", headers=sent(name), params=params)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


@pytest.mark.parametrize(
    ("who", "seen"),
    [("admin", {"alone": 1, "one": 1, "two": 2}), ("alone", {"alone": 1}), ("one", {"one": 1, "two": 2})],
)
def test_a_key_sees_its_own_tenant(live: LiveServer, who: str, seen: dict[str, int]) -> None:
    found = usage(live, who, group_by="key")
    assert {each["key_name"]: each["requests"] for each in found["data"]} == seen
    assert found["total"]["requests"] == sum(seen.values())
    assert found["total"]["generated_tokens"] == 2 * sum(seen.values())


def test_days_and_groups(live: LiveServer) -> None:
    day = str(today())
    found = usage(live, "admin", group_by=["day,model", "tenant"])
    assert [(each["day"], each["model"], each["tenant"], each["requests"]) for each in found["data"]] == [
        (day, MODEL, "alone", 1),
        (day, MODEL, "team", 3),
    ]
    assert usage(live, "admin", end="0001-01-01")["data"] == []
    assert usage(live, "admin", group_by="")["total"]["requests"] == 4
    earlier = str(today() - timedelta(days=40))
    assert usage(live, "alone", start=earlier)["total"]["requests"] == 2
    assert usage(live, "alone", start=earlier, end=earlier, group_by="key")["data"][0]["key_name"] == "old name"


@pytest.mark.parametrize(
    ("who", "seen"),
    [("admin", ["alone", "one", "two", "two"]), ("alone", ["alone"]), ("two", ["one", "two", "two"])],
)
def test_rows_are_those_of_the_tenant(live: LiveServer, who: str, seen: list[str]) -> None:
    answer = live.get("/v1/usage/requests", headers=sent(who))
    assert answer.headers["content-type"] == "application/jsonl"
    assert [LedgerRow(**json.loads(line)).key_name for line in answer.text.splitlines()] == seen
    assert live.get("/v1/usage/requests", headers=sent(who), params={"end": "0001-01-01"}).text == ""
    assert live.get("/v1/usage/requests", headers=sent(who), params={"end": "x"}).status_code == 400


def test_the_command_asks_the_server(live: LiveServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = ["--url", live.url, "--api-key", KEYS["one"].text]
    assert command([*server, "--by", "key", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == usage(live, "one", group_by="key")
    assert command([*server, "--requests", "--csv"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert command(["--url", live.url, "--api-key", "wrong"]) == 1
    assert "key" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"group_by": "week"}, "group_by"),
        ({"group_by": "day,day"}, "group_by"),
        ({"start": "1"}, "start"),
        ({"end": "2026-02-30"}, "end"),
        ({"start": "2999-01-01"}, "start"),
    ],
)
def test_bad_parameters_are_named(live: LiveServer, params: dict[str, str], field: str) -> None:
    answer = live.get("/v1/usage", headers=sent("admin"), params=params)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_no_key_and_no_ledger(live: LiveServer) -> None:
    assert live.get("/v1/usage").status_code == 401
    with live_server() as bare:
        answer = bare.get("/v1/usage")
        assert (answer.status_code, "--ledger none" in answer.text) == (501, True)
