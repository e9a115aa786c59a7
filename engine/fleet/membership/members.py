"""The engines of a fleet that a source names, and what a source of them is."""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Protocol

import msgspec

from sluice.engine.process.curve import ClientCurve, read_pair, read_public
from sluice.errors import invalid

_ADDRESS = re.compile(r"tcp://(\[[0-9a-fA-F:.]+\]|[^\s\[\]:/]+):(\d{1,5})")


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One engine. Members that differ in anything are different engines."""

    name: str
    address: str
    """Where it takes clients: tcp://HOST:PORT."""
    server_key: str | None = None
    """File of its public certificate; None for an engine without keys."""
    client_key: str | None = None
    """File of the secret certificate by which it knows this client."""
    version: str = ""
    """Members of one version share its weight."""
    weight: float = 1.0
    """Requests that its version gets, in relation to those of other versions."""

    def check(self) -> None:
        """Raise INVALID, which names the field, what it has and what was expected."""
        if not self.name or not self.name.isprintable():
            raise invalid("name", f"name must be a printable text that is not empty, got {self.name!r}")
        found = _ADDRESS.fullmatch(self.address)
        if found is None or not 0 < int(found[2]) < 65536:
            raise invalid("address", f"address of {self.name} must be tcp://HOST:PORT, got {self.address!r}")
        if not 0.0 <= self.weight < float("inf"):
            raise invalid("weight", f"weight of {self.name} must be a finite number of at least 0, got {self.weight!r}")
        if (self.server_key is None) != (self.client_key is None):
            given, missing = ("client_key", "server_key") if self.server_key is None else ("server_key", "client_key")
            raise invalid(missing, f"{self.name} has a {given} and no {missing}; encryption takes both")

    def curve(self) -> ClientCurve | None:
        """Read its keys; None without any. Raises INVALID for files that are no certificates."""
        if self.server_key is None or self.client_key is None:
            return None
        return ClientCurve(read_pair(Path(self.client_key)), read_public(Path(self.server_key)))


def never(_: Member) -> bool:
    """Say of no member that it serves: nobody is connected to any."""
    return False


class Membership(Protocol):
    """A source of members."""

    def watch(self, is_serving: Callable[[Member], bool] = never) -> AsyncIterator[tuple[Member, ...]]:
        """Yield the members now, then each time that they have changed. A source that cannot be reached, or says
        something that cannot be read, is logged and asked again; what it said last stays in force. Raises SluiceError
        where the first answer cannot be read at all. `is_serving` tells of a member whether its engine is
        connected and serves; a source that hears nothing of a member does not take it away while that is so."""


class PushedMembership:
    """The members that another process of the server has pushed last. Belongs to the event loop."""

    def __init__(self, members: tuple[Member, ...]) -> None:
        self._members = members
        self._has_changed = asyncio.Event()

    def push(self, members: tuple[Member, ...]) -> None:
        """Name these from now on, and no others."""
        if members != self._members:
            self._members = members
            self._has_changed.set()

    async def watch(self, is_serving: Callable[[Member], bool] = never) -> AsyncIterator[tuple[Member, ...]]:
        while True:
            self._has_changed.clear()
            yield self._members
            await self._has_changed.wait()


def check_members(members: tuple[Member, ...]) -> None:
    """Raise INVALID for a member that cannot be used, and for a name or an address that comes twice."""
    for field in ("name", "address"):
        seen: set[str] = set()
        for member in members:
            member.check()
            value = getattr(member, field)
            if value in seen:
                raise invalid(field, f"{field} must differ from engine to engine, got {value!r} twice")
            seen.add(value)
