"""Who a request is from: proxies, wrong keys by source, and what neither logs nor errors may show."""

from typing import Any

import pytest

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.calls import CallLog
from sluice.gateway.options.access import AccessOptions
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.option import OptionError
from sluice.gateway.tenancy.access.control import AccessControl, Credentials
from sluice.gateway.tenancy.access.identity import Identity, RouteGroup
from sluice.gateway.tenancy.access.keys import NewKey, make_key, revoke_key
from sluice.gateway.tenancy.access.ring import KeyRing
from sluice.gateway.tenancy.access.store import open_keys
from tests.clock import ManualClock

NEW = make_key(Identity(name="ci", tenant="research", networks=("192.0.2.0/24", "127.0.0.1/32", "2001:db8::/32")))
OTHER = make_key(Identity(name="other"))
OWN, ANY = (make_key(Identity(name=name, tenant=name)) for name in ("research", "*"))
PROXY = "10.0.0.1"


def control(*keys: NewKey, clock: ManualClock[float] | None = None, **settings: Any) -> AccessControl:
    ring = KeyRing(None)
    ring.keep(each.stored for each in keys)
    return AccessControl(ring, clock=clock or ManualClock(100.0), **settings)


def sent(key: str | None, peer: str = "127.0.0.1", **more: Any) -> Credentials:
    return Credentials(None if key is None else f"Bearer {key}".encode(), peer, **more)


async def code_of(access: AccessControl, credentials: Credentials) -> ErrorCode | None:
    try:
        await access.identify(credentials, RouteGroup.INFERENCE)
    except SluiceError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "source"),
    [
        ("192.0.2.7", "198.51.100.1", "192.0.2.7"),
        (PROXY, "", PROXY),
        (PROXY, "192.0.2.7", "192.0.2.7"),
        (PROXY, "198.51.100.1, 192.0.2.7", "192.0.2.7"),
        (PROXY, "198.51.100.1, 192.0.2.7, 10.0.0.2", "192.0.2.7"),
        (PROXY, "192.0.2.7, nonsense", "nonsense"),
        ("::ffff:10.0.0.1", "2001:db8::7", "2001:db8::7"),
    ],
)
async def test_only_proxies_say_where_a_request_is_from(peer: str, forwarded_for: str, source: str) -> None:
    access = control(trusted_proxies=("10.0.0.0/8",))
    found = await access.identify(sent(None, peer, forwarded_for=forwarded_for), None)
    assert found.source == source


@pytest.mark.parametrize(
    ("keys", "proxies", "peer", "tenant"),
    [
        ((), (), "192.0.2.7", "theirs"),
        ((), ("10.0.0.0/8",), "192.0.2.7", ""),
        ((), ("10.0.0.0/8",), PROXY, "theirs"),
        ((OTHER,), (), "192.0.2.7", "other"),
        ((OTHER,), ("10.0.0.0/8",), "192.0.2.7", "other"),
        ((OTHER,), ("10.0.0.0/8",), PROXY, "theirs"),
        ((OWN,), (), "192.0.2.7", "research"),
        ((ANY,), (), "192.0.2.7", "theirs"),
    ],
)
async def test_whose_header_names_the_tenant(
    keys: tuple[NewKey, ...], proxies: tuple[str, ...], peer: str, tenant: str
) -> None:
    access = control(*keys, trusted_proxies=proxies)
    assert CallLog(access).is_active == bool(keys or proxies)
    key = (*keys, OTHER)[0].text
    assert (await access.identify(sent(key, peer, tenant="theirs"), None)).tenant == tenant


async def test_an_expired_key_and_a_revoked_one_are_refused() -> None:
    old, gone = make_key(Identity(name="old", expires_at=1.0)), make_key(Identity(name="gone"))
    access = control(old, gone._replace(stored=revoke_key(gone.stored)))
    for key, said in ((old, "key 'old' has expired"), (gone, "the API key is wrong")):
        with pytest.raises(SluiceError, match=said) as refused:
            await access.identify(sent(key.text), None)
        assert refused.value.code is ErrorCode.UNAUTHENTICATED


async def test_networks_hold_behind_a_proxy_too() -> None:
    access = control(NEW, trusted_proxies=("10.0.0.0/8",))
    assert await code_of(access, sent(NEW.text, PROXY, forwarded_for="192.0.2.9")) is None
    assert await code_of(access, sent(NEW.text, PROXY, forwarded_for="198.51.100.9")) is ErrorCode.FORBIDDEN
    assert await code_of(access, sent(NEW.text, "198.51.100.9", forwarded_for="192.0.2.9")) is ErrorCode.FORBIDDEN


async def test_a_source_of_wrong_keys_is_slowed_down_and_nobody_else() -> None:
    clock = ManualClock(100.0)
    access = control(NEW, OTHER, clock=clock)
    assert await code_of(access, sent(OTHER.text)) is None
    for _ in range(10):
        assert await code_of(access, sent("wrong")) is ErrorCode.UNAUTHENTICATED
    with pytest.raises(SluiceError, match=r"too many wrong keys came from 127\.0\.0\.1") as refused:
        await access.identify(sent("wrong"), None)
    assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.OVERLOADED, 2.0)
    assert await code_of(access, sent(NEW.text)) is ErrorCode.OVERLOADED, "one of many guesses"
    assert await code_of(access, sent(OTHER.text)) is None, "known from before"
    assert await code_of(access, sent(NEW.text, "192.0.2.1")) is None
    clock.now += 2.0
    assert await code_of(access, sent(NEW.text)) is None
    assert await code_of(access, sent("wrong")) is ErrorCode.UNAUTHENTICATED
    assert await code_of(access, sent("wrong")) is ErrorCode.OVERLOADED


async def test_an_ipv6_network_is_one_source_and_memory_is_bounded() -> None:
    access = control(OTHER)
    for number in range(10):
        await code_of(access, sent("wrong", f"2001:db8::{number:x}"))
    assert await code_of(access, sent("wrong", "2001:db8::ffff:1")) is ErrorCode.OVERLOADED
    assert await code_of(access, sent("wrong", "2001:db8:1::1")) is ErrorCode.UNAUTHENTICATED
    for number in range(12_000):
        await code_of(access, sent("wrong", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"))
    assert len(access._sources._sources) == 10_000


@pytest.mark.parametrize("key", ["", " ", NEW.text[:-1], f"{NEW.text}\xff", "x" * 10_000], ids=range(5))
async def test_a_wrong_key_is_not_repeated(key: str) -> None:
    with pytest.raises(SluiceError) as refused:
        await control(NEW).identify(sent(key), None)
    assert (refused.value.code, refused.value.message) == (ErrorCode.UNAUTHENTICATED, "the API key is wrong")


async def test_neither_options_nor_calls_show_a_key() -> None:
    config = ServeConfig(access=AccessOptions(api_key="sesame", keys_store="redis://:secret@host/0"))
    call = CallLog(control(NEW)).open("openai", "/v1/models", "id")
    call.identity = NEW.stored.identity
    for shown in (repr(config), repr(call), repr(NEW.stored.identity)):
        assert not any(secret in shown for secret in ("sesame", "secret", NEW.text, NEW.stored.digest))


def test_the_key_s_file(tmp_path: Any) -> None:
    path = tmp_path / "key"
    path.write_text("sesame\n# a note\n")
    assert AccessOptions(api_key_file=str(path)).server_key() == "sesame"
    path.write_text("\n")
    for broken in (path, tmp_path / "none"):
        with pytest.raises(OptionError, match="--api-key-file"):
            AccessOptions(api_key_file=str(broken)).server_key()
    with pytest.raises(OptionError, match="give one of them"):
        AccessOptions(api_key="a", api_key_file=str(path))


async def test_until_the_keys_are_known_nobody_enters() -> None:
    access = AccessControl(KeyRing(open_keys("redis://127.0.0.1:1/0")))
    await access.ring.refresh()
    assert access.is_enforced
    assert await code_of(access, sent(NEW.text)) is ErrorCode.UNAVAILABLE
    assert await code_of(access, sent(None)) is ErrorCode.UNAUTHENTICATED
    await access.close()
