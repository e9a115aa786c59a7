"""A key gives away no right that it lacks, over HTTP, and a new one administrates nothing."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.access.grants import check_change, check_grant
from sluice.gateway.tenancy.access.identity import NEW_KEY_GROUPS, Identity, QuotaLimits, RouteGroup
from sluice.gateway.tenancy.access.keys import StoredKey, make_key, parse_fields, update_key
from sluice.gateway.tenancy.access.ring import SERVER_KEY
from tests.gateway.front.http.live import live_server
from tests.gateway.tenancy.access.test_access import ALL, COMPLETION, Keys

PATH = "/v1/admin/keys"
LIMITED = Identity(
    name="giver",
    tenant="research",
    groups=frozenset({RouteGroup.ADMIN, RouteGroup.INFERENCE}),
    models=("rill*", "b?"),
    adapters=("fr",),
    priorities=(0, 10),
    networks=("10.0.0.0/8",),
    expires_at=1000.0,
    limits=QuotaLimits(requests_per_minute=60, cached_token_rate=0.5),
)


@pytest.fixture(scope="module")
def keys() -> Iterator[Keys]:
    with live_server() as live:
        found = Keys(live)
        found.make(name="first")
        yield found


def stored_before_groups_were_written(name: str) -> StoredKey:
    """A key as older versions stored it: without groups, which meant all."""
    record = msgspec.to_builtins(make_key(Identity(name=name)).stored)
    del record["identity"]["groups"]
    return msgspec.convert(record, StoredKey)


@pytest.mark.parametrize("fields", [{}, {"groups": list(NEW_KEY_GROUPS)}])
def test_a_new_key_has_the_groups_of_clients(fields: dict[str, Any]) -> None:
    assert make_key(parse_fields({"name": "ci", **fields})).stored.identity.groups == NEW_KEY_GROUPS


def test_a_new_key_s_groups_are_written() -> None:
    stored = make_key(parse_fields({"name": "ci"})).stored
    again = msgspec.json.decode(msgspec.json.encode(stored), type=StoredKey)
    assert (again.identity.groups, again.has_unnamed_admin) == (NEW_KEY_GROUPS, False)


def test_a_key_of_an_older_version_keeps_its_groups() -> None:
    old = stored_before_groups_were_written("old")
    assert (old.identity.groups, old.has_unnamed_admin) == (ALL, True)
    changed = update_key(old, {"limits": {"requests_per_minute": 5}})
    assert (changed.identity.groups, changed.has_unnamed_admin) == (ALL, True)


@pytest.mark.parametrize("groups", [["admin", "inference"], [*map(str, RouteGroup)]])
def test_groups_that_are_named_are_no_older_version_s(groups: list[str]) -> None:
    named = update_key(stored_before_groups_were_written("old"), {"groups": groups})
    again = msgspec.json.decode(msgspec.json.encode(named), type=StoredKey)
    assert (again.identity.groups, again.has_unnamed_admin) == (frozenset(groups), False)


def test_removing_groups_gives_those_of_a_new_key() -> None:
    stored = make_key(Identity(name="ci", groups=frozenset({RouteGroup.METRICS}))).stored
    assert update_key(stored, {"groups": None}).identity.groups == NEW_KEY_GROUPS


@pytest.mark.parametrize(
    "fields",
    [
        {"groups": frozenset({RouteGroup.INFERENCE})},
        {"models": ("rill-2", "rill*", "b1", "b?", "rill-*x")},
        {"priorities": (5, 5)},
        {"networks": ("10.1.0.0/16", "10.0.0.1")},
        {"expires_at": 999.0},
        {"limits": QuotaLimits(requests_per_minute=60, cached_token_rate=1.0, tokens_per_day=1)},
        {"adapters": ()},
    ],
)
def test_what_a_key_has_it_may_give(fields: dict[str, Any]) -> None:
    check_grant(LIMITED, msgspec.structs.replace(LIMITED, name="made", **fields))


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("groups", frozenset({RouteGroup.METRICS})),
        ("models", ("*",)),
        ("models", ("b*",)),
        ("models", ("[r]ill*",)),
        ("adapters", ("fr*",)),
        ("tenant", "other"),
        ("tenant", ""),
        ("tenant", "*"),
        ("priorities", (-1, 10)),
        ("networks", ()),
        ("networks", ("10.0.0.0/7",)),
        ("networks", ("::1",)),
        ("expires_at", None),
        ("expires_at", 1001.0),
        ("limits.requests_per_minute", None),
        ("limits.requests_per_minute", 61),
        ("limits.cached_token_rate", 0.1),
    ],
)
def test_what_a_key_lacks_it_cannot_give(param: str, value: Any) -> None:
    field, _, limit = param.partition(".")
    given = msgspec.structs.replace(LIMITED.limits, **{limit: value}) if limit else value
    with pytest.raises(SluiceError) as refused:
        check_grant(LIMITED, msgspec.structs.replace(LIMITED, **{field: given}))
    assert (refused.value.code, refused.value.param) == (ErrorCode.FORBIDDEN, param)


def test_the_server_s_own_key_gives_everything() -> None:
    check_grant(SERVER_KEY, Identity(name="any", groups=ALL, tenant="*"))


def test_a_change_is_checked_where_it_changes() -> None:
    wide = make_key(Identity(name="wide", groups=ALL)).stored
    check_change(LIMITED, wide, update_key(wide, {"limits": {"requests_per_minute": 5}}))
    with pytest.raises(SluiceError, match="adapters: key 'giver' cannot give"):
        check_change(LIMITED, wide, update_key(wide, {"adapters": ["x*"]}))


def test_a_key_with_a_quota_mints_none_without(keys: Keys) -> None:
    header = keys.make(name="thrifty", groups=ALL, limits=QuotaLimits(tokens_per_day=5))
    assert keys.live.post(PATH, {"name": "free"}, headers=header).status_code == 403
    assert keys.live.get(f"{PATH}/free", headers=header).status_code == 404
    made = keys.live.post(PATH, {"name": "paid", "limits": {"tokens_per_day": 5}}, headers=header)
    assert (made.status_code, made.json()["groups"]) == (201, sorted(NEW_KEY_GROUPS))


def test_an_administrator_takes_no_text_of_a_key_with_more_rights(keys: Keys) -> None:
    header = keys.make(name="clerk", groups=frozenset({RouteGroup.ADMIN}))
    keys.make(name="worker")
    refused = keys.live.post(f"{PATH}/worker/rotate", headers=header)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "groups")
    assert keys.live.post(f"{PATH}/clerk/rotate", headers=header).status_code == 200


def test_a_tenant_does_not_loosen_its_own_limits(keys: Keys) -> None:
    header, other = keys.make(tenant="acme", groups=ALL), keys.make(groups=ALL)
    path = "/v1/admin/tenants/acme"
    assert keys.live.request("PUT", path, json={"limits": {"tokens_per_day": 5}}, headers=other).status_code == 200
    refused = keys.live.request("PUT", path, json={"limits": {}}, headers=header)
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "limits.tokens_per_day")
    assert keys.live.request("PUT", path, json={"limits": {}}, headers=other).status_code == 200


def test_a_new_key_sees_nothing_of_others(keys: Keys) -> None:
    root, plain = keys.make(name="owner", groups=ALL), keys.make(name="stranger")
    keys.live.post("/v1/completions", COMPLETION, headers=root | {"x-request-id": "of-the-owner"})
    file = {"files": {"file": ("a.jsonl", b"{}")}, "data": {"purpose": "batch"}}
    uploaded = keys.live.request("POST", "/v1/files", headers=root, **file).json()["id"]
    paths = (f"/v1/files/{uploaded}", f"/v1/files/{uploaded}/content", "/v1/requests/of-the-owner/timeline")
    assert [keys.live.get(path, headers=plain).status_code for path in paths] == [404, 404, 404]
    assert keys.live.get("/v1/files", headers=plain).json()["data"] == []
    assert keys.live.get("/v1/requests", headers=plain).json()["data"] == []
