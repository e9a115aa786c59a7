"""The keys of a server in memory, which follow their store."""

import asyncio
import hmac
import logging
from collections.abc import Callable, Iterable
from time import time

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.tenancy.access.identity import ANY_TENANT, Identity, QuotaLimits, RouteGroup
from sluice.gateway.tenancy.access.keys import StoredKey, digest_of, find_key_id
from sluice.gateway.tenancy.access.store import KeyStore

log = logging.getLogger(__name__)

_PERIOD_S = 0.5
"""Seconds between looks at the store: a change takes effect within a second."""
SERVER_KEY = Identity(key_id="api-key", name="api-key", tenant=ANY_TENANT, groups=frozenset(RouteGroup))
"""The sender of the one key that the command line gives, which has all rights."""
_NO_DIGEST = digest_of("")


class KeyRing:
    """Finds the identity behind a key. Belongs to the event loop.

    A store that is away leaves the last known keys in force. Until the first answer of a store, `is_known` is false.
    """

    def __init__(self, store: KeyStore | None, server_key: str | None = None, *, is_required: bool = False) -> None:
        """`server_key` is the key of `SERVER_KEY`. `store` None: there is no other. Where keys are required, a store
        without any lets nobody in."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when keys have changed."""
        self.on_look: Callable[[], None] = lambda: None
        """Called after each look at the store, for what time changes: keys expire."""
        self.store = store
        self.is_known = store is None
        self.is_required = is_required
        """Whether requests need a key even while there is none. True from when a store has had one."""
        self._server_digest = None if server_key is None else digest_of(server_key)
        self.tenants: dict[str, QuotaLimits] = {}
        """Limits of tenants; another object after a change."""
        self._keys: dict[str, StoredKey] = {}
        self._by_subject: dict[str, Identity] = {}
        self._version = -1
        self.problem = ""
        """Why the store cannot be read now; "" where it can."""
        self._following: asyncio.Task[None] | None = None

    @property
    def keys(self) -> list[StoredKey]:
        """All keys of the store, revoked ones too."""
        return list(self._keys.values())

    @property
    def has_server_key(self) -> bool:
        return self._server_digest is not None

    @property
    def has_keys(self) -> bool:
        """Whether any key exists, revoked ones too."""
        return bool(self._keys) or self._server_digest is not None

    def find(self, key: bytes) -> Identity | None:
        """Return whose key it is, None for a wrong one. Takes as long for any key of the same length."""
        digest = digest_of(key)
        if self._server_digest is not None and hmac.compare_digest(digest, self._server_digest):
            return SERVER_KEY
        stored = self._keys.get(find_key_id(key) or "")
        if stored is None:
            hmac.compare_digest(digest, _NO_DIGEST)
            return None
        return stored.identity if stored.is_opened_by(digest, time()) and stored.is_active else None

    def find_by_id(self, key_id: str) -> Identity | None:
        """Return the identity with that id; None where its key is revoked."""
        if key_id == SERVER_KEY.key_id:
            return SERVER_KEY if self._server_digest is not None else None
        stored = self._keys.get(key_id)
        return stored.identity if stored is not None and stored.is_active else None

    def find_subject(self, subject: str) -> Identity | None:
        """Return the identity that a client certificate with that common name stands for."""
        return self._by_subject.get(subject)

    async def start(self) -> None:
        """Read the store, and follow its changes from here on."""
        if self.store is not None and self._following is None:
            await self.refresh()
            await self._note_keys(self.store)
            self._following = asyncio.create_task(self._follow(self.store), name="keys")

    async def refresh(self) -> None:
        """Read the store where it has changed."""
        if self.store is not None:
            await self._look(self.store)

    def keep(self, keys: Iterable[StoredKey]) -> None:
        """Keep these keys in the place of all before."""
        self._keys = {each.id: each for each in keys}
        active = (each.identity for each in self._keys.values() if each.is_active)
        self._by_subject = {each.subject: each for each in active if each.subject}
        self.is_known = True
        self.on_change()

    def _follow_change(self, version: int, keys: list[StoredKey]) -> None:
        """Keep the keys of the store. Raises UNAVAILABLE where it has lost them all: revoked ones would be there."""
        if self._keys and not keys:
            raise SluiceError(ErrorCode.UNAVAILABLE, "--keys-store has lost its keys")
        self.keep(keys)
        self._version = version

    async def _note_keys(self, store: KeyStore) -> None:
        """Have a store that an older version wrote remember that it has keys."""
        if self._keys:
            try:
                await store.note_keys()
            except SluiceError as error:
                log.warning("%s", error.message)

    async def _follow(self, store: KeyStore) -> None:
        while True:
            await asyncio.sleep(_PERIOD_S)
            await self._look(store)

    async def _look(self, store: KeyStore) -> None:
        try:
            version = await store.version()
            if version != self._version:
                keys, tenants = await store.load(), await store.load_tenants()
                self.is_required |= bool(keys) or await store.had_keys()
                self._follow_change(version, keys)
                self.tenants = tenants
        except SluiceError as error:
            if not self.problem:
                log.warning("keys are not read, those known stay in force: %s", error.message)
            self.problem = error.message
        else:
            self.problem = ""
        self.on_look()

    async def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait((self._following,))
        if self.store is not None:
            await self.store.close()
