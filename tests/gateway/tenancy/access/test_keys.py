"""Keys and their stores: one contract over SQLite and Redis; and a lost store, with which a server lets nobody in."""

import asyncio
import logging
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from time import time
from typing import Any

import apsw
import msgspec
import pytest
from redis.asyncio import Redis

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.config import ServeConfig, read_config
from sluice.gateway.options.option import OptionError
from sluice.gateway.tenancy.access.control import AccessControl, Credentials
from sluice.gateway.tenancy.access.identity import NO_LIMITS, Identity, QuotaLimits, RouteGroup
from sluice.gateway.tenancy.access.keys import (
    PREFIX,
    StoredKey,
    describe_key,
    digest_of,
    make_key,
    parse_fields,
    revoke_key,
    rotate_key,
    update_key,
)
from sluice.gateway.tenancy.access.ring import SERVER_KEY, KeyRing
from sluice.gateway.tenancy.access.store import IN_FILE, KeyStore, open_keys
from sluice.gateway.tenancy.accounts import make_access, report_access
from sluice.state.connections import Schema
from tests.gateway.tenancy.access.test_grants import stored_before_groups_were_written
from tests.serving.caching.parts import RedisServer


@pytest.fixture(params=["sqlite", "redis"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[tuple[KeyStore, KeyStore]]:
    """Two connections to one store, as of two servers."""
    server, place = None, str(tmp_path / "state" / "keys.sqlite")
    if request.param == "redis":
        server = RedisServer(tmp_path)
        await server.start()
        place = f"redis://127.0.0.1:{server.port}/0"
    opened = open_keys(place), open_keys(place)
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


async def write_as_before(place: str, key: StoredKey, limits: QuotaLimits) -> None:
    """Write a key and a tenant as versions did that had a table, or in Redis a hash, for each."""
    keys, tenants = [(key.id, msgspec.json.encode(key))], [("research", msgspec.json.encode(limits))]
    if place.startswith("redis:"):
        async with Redis.from_url(place) as client:
            await client.hset("sluice:keys", *keys[0])
            await client.hset("sluice:tenants", *tenants[0])
            await client.set("sluice:keys:version", 77)
        return
    connection = apsw.Connection(place)
    Schema(IN_FILE.schema.application_id, IN_FILE.schema.steps[:2]).upgrade(connection)
    connection.executemany("INSERT INTO keys VALUES (?, ?)", keys)
    connection.executemany("INSERT INTO tenants VALUES (?, ?)", tenants)
    connection.execute("UPDATE state SET version = 77")
    connection.close()


@pytest.mark.parametrize("is_in_redis", [False, True])
async def test_what_older_versions_wrote_is_read(tmp_path: Path, is_in_redis: bool) -> None:
    server, place = RedisServer(tmp_path), str(tmp_path / "keys.sqlite")
    if is_in_redis:
        await server.start()
        place = f"redis://127.0.0.1:{server.port}/0"
    old, limits = make_key(Identity(name="ci")).stored, QuotaLimits(tokens_per_day=5)
    await write_as_before(place, old, limits)
    first, second = open_keys(place), open_keys(place)
    for each in (first, second):
        assert (await each.version(), await each.load(), await each.load_tenants()) == (77, [old], {"research": limits})
    await first.change("ci", revoke_key)
    assert await second.version() != 77
    assert not (await second.load())[0].is_active
    for each in (first, second):
        await each.close()
    server.kill()


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


async def test_changes_at_the_same_time_all_stay_and_a_name_is_one_key_s(stores: tuple[KeyStore, KeyStore]) -> None:
    names = [*"abcdef", *("same" for _ in range(6))]
    adding = (stores[n % 2].add(make_key(Identity(name=name)).stored) for n, name in enumerate(names))
    ended = await asyncio.gather(*adding, return_exceptions=True)
    assert sum(isinstance(each, SluiceError) for each in ended) == 5
    fields: list[dict[str, Any]] = [{"tenant": "t"}, {"weight": 2.0}, {"groups": ["rag"]}, {"models": ["m"]}]
    changes = [partial(update_key, changes=each) for each in fields]
    await asyncio.gather(*(stores[n % 2].change("same", each) for n, each in enumerate(changes)))
    for each in stores:
        keys = {key.name: key.identity for key in await each.load()}
        assert sorted(keys) == [*"abcdef", "same"]
        same = keys["same"]
        assert (same.tenant, same.weight, [*same.groups], same.models) == ("t", 2.0, ["rag"], ("m",))


async def test_a_store_that_is_away_leaves_the_known_keys_in_force(tmp_path: Path) -> None:
    server = RedisServer(tmp_path)
    await server.start()
    store = open_keys(f"redis://127.0.0.1:{server.port}/0")
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
    store = open_keys(str(path))
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
    store, new = open_keys(str(path)), make_key(Identity(name="ci"))
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


@asynccontextmanager
async def started(folder: Path, access: AccessOptions | None = None) -> AsyncIterator[AccessControl]:
    """Yield the access control of a server that has just started, with its state in a folder."""
    config = ServeConfig(access=access or AccessOptions(), batches=BatchOptions(state_path=str(folder)))
    control = make_access(config)
    await control.ring.start()
    try:
        yield control
    finally:
        await control.close()


async def make_keys(folder: Path, *keys: StoredKey) -> Path:
    """Write keys as `sluice keys create` does. Returns the file."""
    path = folder / "keys.sqlite"
    store = open_keys(str(path))
    for each in keys or (make_key(Identity(name="ci")).stored,):
        await store.add(each)
    await store.close()
    return path


async def lets_strangers_in(access: AccessControl) -> bool:
    try:
        await access.identify(Credentials(None, "127.0.0.1"), None)
    except SluiceError as refusal:
        assert refusal.code is ErrorCode.UNAUTHENTICATED
        return False
    return True


def delete(path: Path) -> None:
    for each in path.parent.glob("keys.sqlite*"):
        if not each.name.endswith(".required"):
            each.unlink()


def truncate(path: Path) -> None:
    delete(path)
    path.touch()


def delete_rows(path: Path) -> None:
    with apsw.Connection(str(path)) as connection:
        connection.execute("DELETE FROM records WHERE owner = 'keys'")
    connection.close()


async def test_a_server_that_never_had_keys_is_open(tmp_path: Path) -> None:
    async with started(tmp_path / "new") as access:
        assert await lets_strangers_in(access)
    assert not (tmp_path / "new").exists()


def revoke_all(path: Path) -> None:
    with apsw.Connection(str(path)) as connection:
        [(record,)] = connection.execute("SELECT body FROM records WHERE owner = 'keys'")
        revoked = revoke_key(msgspec.json.decode(record, type=StoredKey))
        connection.execute("UPDATE records SET body = ? WHERE owner = 'keys'", (msgspec.json.encode(revoked),))
    connection.close()


@pytest.mark.parametrize("lose", [delete, truncate, delete_rows, revoke_all])
async def test_a_store_that_lost_its_keys_before_the_start_lets_nobody_in(
    tmp_path: Path, lose: Callable[[Path], None]
) -> None:
    lose(await make_keys(tmp_path))
    async with started(tmp_path) as access:
        assert not await lets_strangers_in(access)


async def test_a_store_of_an_older_version_is_remembered_from_its_first_start(tmp_path: Path) -> None:
    path = await make_keys(tmp_path)
    path.with_name("keys.sqlite.required").unlink()
    async with started(tmp_path) as access:
        delete(path)
        await access.ring.refresh()
        assert access.ring.problem == "--keys-store has lost its keys"
    async with started(tmp_path) as access:
        assert not await lets_strangers_in(access)


async def test_a_store_without_its_marker_is_open_again(tmp_path: Path) -> None:
    path = await make_keys(tmp_path)
    delete(path)
    path.with_name("keys.sqlite.required").unlink()
    async with started(tmp_path) as access:
        assert await lets_strangers_in(access)


@pytest.mark.parametrize("option", ["keys_store", "requires_keys"])
async def test_a_folder_that_is_not_mounted_lets_nobody_in(tmp_path: Path, option: str) -> None:
    value = str(tmp_path / "unmounted" / "keys.sqlite") if option == "keys_store" else True
    async with started(tmp_path / "state", AccessOptions(**{option: value})) as access:  # type: ignore[arg-type]
        assert not await lets_strangers_in(access)


async def test_a_key_opens_a_required_store_that_is_empty(tmp_path: Path) -> None:
    new = make_key(Identity(name="ci"))
    async with started(tmp_path, AccessOptions(requires_keys=True)) as access:
        await make_keys(tmp_path, new.stored)
        await access.ring.refresh()
        sent = Credentials(f"Bearer {new.text}".encode(), "127.0.0.1")
        assert (await access.identify(sent, None)).identity == new.stored.identity


async def test_a_redis_is_named_without_its_password() -> None:
    store = open_keys("redis://:secret@cache.test:6380/1")
    assert store.place == "redis://cache.test:6380/1"
    await store.close()


async def nothing(folder: Path) -> None: ...


async def two_keys(folder: Path) -> None:
    await make_keys(folder, *(make_key(Identity(name=each)).stored for each in "ab"))


async def lost_keys(folder: Path) -> None:
    delete(await make_keys(folder))


async def an_administrator_of_an_older_version(folder: Path) -> None:
    named = make_key(Identity(name="boss", groups=frozenset({RouteGroup.ADMIN}))).stored
    await make_keys(folder, stored_before_groups_were_written("old"), named)


AWAY = AccessOptions(keys_store="redis://127.0.0.1:1/0")


@pytest.mark.parametrize(
    ("prepare", "access", "said"),
    [
        (nothing, None, ["keys are off: nobody is asked for one;", "({}/keys.sqlite)"]),
        (two_keys, None, ["keys are on: 2 of 2 keys in {}/keys.sqlite are active"]),
        (lost_keys, None, ["keys are on: 0 of 0 keys in", "so every request is refused", "delete the store and"]),
        (
            an_administrator_of_an_older_version,
            None,
            ["admin rights without being told, as older versions made them: 1 (old)."],
        ),
        (nothing, AWAY, ["keys are on, and those of redis://127.0.0.1:1/0 cannot be read"]),
    ],
    ids=["never any", "two", "lost", "an administrator that nobody named", "away"],
)
async def test_the_start_says_how_keys_are(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    prepare: Callable[[Path], Awaitable[None]],
    access: AccessOptions | None,
    said: list[str],
) -> None:
    await prepare(tmp_path)
    with caplog.at_level(logging.INFO):
        async with started(tmp_path, access) as control:
            caplog.clear()
            report_access(control)
    last = caplog.records[-1].getMessage()
    assert all(each.format(tmp_path) in last for each in said), last


def test_a_server_that_could_let_nobody_in_does_not_start() -> None:
    with pytest.raises(OptionError, match="--require-keys with --keys-store none lets nobody in"):
        read_config({"--require-keys": True, "--keys-store": "none"}, {})
