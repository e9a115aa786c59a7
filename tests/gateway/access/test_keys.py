"""Keys and their stores: one contract over SQLite and Redis."""

import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from time import time
from typing import Any

import msgspec
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.access.identity import NO_LIMITS, Identity, QuotaLimits
from sluice.gateway.access.keys import (
    PREFIX,
    StoredKey,
    describe_key,
    digest_of,
    make_key,
    parse_fields,
    revoke_key,
    rotate_key,
)
from sluice.gateway.access.redis_store import RedisKeys
from sluice.gateway.access.ring import SERVER_KEY, KeyRing
from sluice.gateway.access.store import KeyStore, SqliteKeys
from sluice.gateway.accounts import make_access
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.config import ServeConfig
from tests.serving.caching.parts import RedisServer


@pytest.fixture(params=["sqlite", "redis"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[KeyStore, KeyStore]]:
    """Two connections to one store, as of two servers."""
    opened: tuple[KeyStore, KeyStore]
    server = None
    if request.param == "sqlite":
        path = tmp_path / "state" / "keys.sqlite"
        opened = SqliteKeys(path), SqliteKeys(path)
    else:
        server = RedisServer(tmp_path)
        await server.start()
        url = f"redis://127.0.0.1:{server.port}/0"
        opened = RedisKeys(url), RedisKeys(url)
    yield opened
    for each in opened:
        await each.close()
    if server is not None:
        server.kill()


async def test_a_change_on_one_server_reaches_another(stores: tuple[KeyStore, KeyStore]) -> None:
    mine, theirs = stores
    ring = KeyRing(theirs)
    changes: list[bool] = []
    ring.on_change = lambda: changes.append(ring.has_keys)
    await ring.refresh()
    assert not ring.has_keys
    new = make_key(Identity(name="ci"))
    await mine.add(new.stored)
    await ring.refresh()
    assert ring.find(new.text.encode()) == new.stored.identity
    rotated = rotate_key(new.stored, 60)
    await mine.change("ci", lambda key: rotated.stored)
    await ring.refresh()
    assert ring.find(new.text.encode()) == ring.find(rotated.text.encode()) == new.stored.identity
    await mine.change(new.stored.id, revoke_key)
    await ring.refresh()
    assert ring.find(new.text.encode()) is ring.find(rotated.text.encode()) is ring.find_by_id(new.stored.id) is None
    assert changes == [False, True, True, True]
    await ring.refresh()
    assert len(changes) == 4


async def test_a_tenant_s_limits_reach_another_server(stores: tuple[KeyStore, KeyStore]) -> None:
    mine, theirs = stores
    ring = KeyRing(theirs)
    await ring.refresh()
    before = ring.tenants
    await mine.set_tenant("research", QuotaLimits(tokens_per_day=5))
    await ring.refresh()
    assert ring.tenants == {"research": QuotaLimits(tokens_per_day=5)}
    assert ring.tenants is not before
    await mine.set_tenant("research", NO_LIMITS)
    await ring.refresh()
    assert ring.tenants == {}


async def test_names_are_unique_among_keys_that_are_not_revoked(stores: tuple[KeyStore, KeyStore]) -> None:
    first, second = make_key(Identity(name="ci")).stored, make_key(Identity(name="ci")).stored
    await stores[0].add(first)
    with pytest.raises(SluiceError, match="a key named 'ci' exists") as refused:
        await stores[1].add(second)
    assert refused.value.code is ErrorCode.ALREADY_EXISTS
    await stores[0].change("ci", revoke_key)
    with pytest.raises(SluiceError, match="no key 'ci'"):
        await stores[0].change("ci", revoke_key)
    await stores[1].add(second)
    assert [each.is_active for each in await stores[0].load()] == [False, True]


async def test_a_store_that_is_away_leaves_the_known_keys_in_force(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    await server.start()
    store = RedisKeys(f"redis://127.0.0.1:{server.port}/0")
    new = make_key(Identity(name="ci"))
    await store.add(new.stored)
    known, fresh = KeyRing(store), KeyRing(store)
    await known.refresh()
    server.kill()
    await known.refresh()
    await fresh.refresh()
    assert known.find(new.text.encode()) == new.stored.identity
    assert (known.is_known, fresh.is_known) == (True, False)
    await store.close()


async def test_a_store_that_loses_its_keys_opens_nothing(tmp_path: Path) -> None:
    path, new = tmp_path / "keys.sqlite", make_key(Identity(name="ci"))
    store = SqliteKeys(path)
    await store.add(new.stored)
    ring = KeyRing(store)
    await ring.refresh()
    for each in (path, path.with_name("keys.sqlite-wal"), path.with_name("keys.sqlite-shm")):
        each.unlink(missing_ok=True)
    await ring.refresh()
    assert ring.find(new.text.encode()) == new.stored.identity
    other = make_key(Identity(name="other"))
    await store.add(other.stored)
    await ring.refresh()
    assert (ring.find(new.text.encode()), ring.find(other.text.encode())) == (None, other.stored.identity)
    await ring.close()


async def test_a_file_has_digests_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "keys.sqlite"
    store, new = SqliteKeys(path), make_key(Identity(name="ci"))
    assert (await store.version(), await store.load(), path.exists()) == (0, [], False)
    await store.add(new.stored)
    await store.close()
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    secret = new.text.removeprefix(f"{PREFIX}{new.stored.id}-").encode()
    assert len(secret) == 43
    assert secret not in path.read_bytes()


def test_a_key_is_opened_by_its_own_text_alone() -> None:
    new, other = make_key(Identity(name="a")), make_key(Identity(name="a"))
    ring = KeyRing(None, "sesame")
    ring.keep([new.stored])
    mixed = f"{PREFIX}{new.stored.id}-{other.text.rpartition(other.stored.id + '-')[2]}"
    assert ring.find(new.text.encode()) == new.stored.identity
    wrong = (other.text, mixed, new.text[:-1], new.text + "x", f"{PREFIX}{new.stored.id}-", "", PREFIX, "sesam", "\xff")
    assert [ring.find(each.encode()) for each in wrong] == [None] * len(wrong)
    assert ring.find(b"sesame") is SERVER_KEY


def test_an_old_text_ends_with_its_grace() -> None:
    new = make_key(Identity(name="a"))
    rotated = rotate_key(new.stored, grace_s=10)
    digest = digest_of(new.text)
    assert rotated.stored.is_opened_by(digest, time())
    assert not rotated.stored.is_opened_by(digest, time() + 10)
    assert rotated.stored.is_opened_by(digest_of(rotated.text), time() + 10)
    assert not new.stored.is_opened_by(digest_of(rotated.text), time())


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "body"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": 5}, "name"),
        ({"name": "x" * 129}, "name"),
        ({"tenant": "a\tb"}, "tenant"),
        ({"weight": 0}, "weight"),
        ({"weight": float("nan")}, "weight"),
        ({"priorities": [5, 4]}, "priorities"),
        ({"priorities": [0, 2**31]}, "priorities"),
        ({"groups": []}, "groups"),
        ({"groups": ["all"]}, "groups"),
        ({"models": [""]}, "models"),
        ({"networks": ["here"]}, "networks"),
        ({"limits": {"requests_per_minute": -1}}, "limits.requests_per_minute"),
        ({"limits": {"requests": 1}}, "limits"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"is_foreign": True}, "is_foreign"),
        ({"expire_at": 1}, "body"),
    ],
)
def test_fields_that_no_key_can_have_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(SluiceError) as refused:
        parse_fields({"name": "a", **fields} if fields else {})
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, param)


def test_what_is_shown_has_no_digest() -> None:
    new = make_key(Identity(name="a", models=("m*",)))
    shown = describe_key(new.stored)
    assert (shown["models"], shown["state"]) == (("m*",), "active")
    assert new.stored.digest not in str(shown)
    assert describe_key(revoke_key(new.stored))["state"] == "revoked"
    again = msgspec.json.decode(msgspec.json.encode(new.stored), type=StoredKey)
    assert again == new.stored


async def test_a_folder_that_cannot_be_entered_opens_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "loop"
    folder.symlink_to(folder)  # root may enter every folder but this one
    access = make_access(ServeConfig(batches=BatchOptions(state_path=str(folder))))
    await access.ring.refresh()
    assert (access.ring.is_known, access.is_enforced) == (False, True)
