"""Members that another process of the server knows and passes on."""

import asyncio
from collections.abc import AsyncIterator, Callable

from sluice.engine.fleet.membership.members import Member, never


class PushedMembership:
    """The members that were pushed last. Belongs to the event loop."""

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
