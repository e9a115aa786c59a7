"""A server whose key store is lost lets nobody in, and says so at its start."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import apsw
import msgspec
import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.batches import BatchOptions
from sluice.gateway.options.config import ServeConfig, read_config
from sluice.gateway.options.option import OptionError
from sluice.gateway.tenancy.access.control import AccessControl, Credentials
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import StoredKey, make_key, revoke_key
from sluice.gateway.tenancy.access.store import open_keys
from sluice.gateway.tenancy.accounts import make_access, report_access
from tests.gateway.tenancy.access.test_grants import stored_before_groups_were_written


@asynccontextmanager
async def started(folder: Path, access: AccessOptions | None = None) -> AsyncIterator[AccessControl]:
    """What decides of the requests of a server that has just started, with its state in a folder."""
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
    async with started(tmp_path):
        delete(path)
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
