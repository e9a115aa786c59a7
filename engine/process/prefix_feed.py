"""Tells clients which prefixes an engine has in its cache."""

from collections.abc import Callable, Sequence
from typing import Protocol

from sluice.engine.frames import PrefixChanges

MAX_HASHES = 4096
"""Most hashes of one message: 64 KiB."""
Hashes = Sequence[bytes]


class FollowedIndex(Protocol):
    """The index, which records its changes while it is followed. `sluice.engine.kv_cache.BlockPool` is one."""

    def hashes(self) -> Hashes: ...

    def follow(self, is_followed: bool) -> None: ...

    def take_changes(self) -> tuple[Hashes, Hashes] | None: ...


class PrefixFeed:
    """Sends the index to each client that asks for it, and then its changes. Used by the engine thread alone."""

    def __init__(self, index: FollowedIndex, send: Callable[[bytes, PrefixChanges], None]) -> None:
        self._index = index
        self._send = send
        self._numbers: dict[bytes, int] = {}
        """The clients that follow the index, and the number of the last message to each."""

    def follow(self, client: bytes, is_wanted: bool) -> None:
        """Begin or end to tell a client. Nothing happens where that is so already."""
        if is_wanted == (client in self._numbers):
            return
        if not is_wanted:
            del self._numbers[client]
            if not self._numbers:
                self._index.follow(False)
            return
        if self._numbers:
            self.flush()  # the others, which have not got what the new one gets at once
        else:
            self._index.follow(True)
        self._numbers[client] = 0
        self._send_index(client)

    def flush(self) -> None:
        """Send the changes since the last time."""
        if not self._numbers:
            return
        changes = self._index.take_changes()
        for client in tuple(self._numbers):  # a client that cannot be reached is forgotten while it is sent to
            if changes is None:
                self._send_index(client)
            else:
                self._send_pieces(client, *changes)

    def _send_index(self, client: bytes) -> None:
        hashes = self._index.hashes()
        self._send_next(client, hashes[:MAX_HASHES], (), is_first=True)
        self._send_pieces(client, hashes[MAX_HASHES:], ())

    def _send_pieces(self, client: bytes, stored: Hashes, removed: Hashes) -> None:
        for begin in range(0, max(len(stored), len(removed)), MAX_HASHES):
            piece = slice(begin, begin + MAX_HASHES)
            self._send_next(client, stored[piece], removed[piece])

    def _send_next(self, client: bytes, stored: Hashes, removed: Hashes, *, is_first: bool = False) -> None:
        if client in self._numbers:
            self._numbers[client] += 1
            number = self._numbers[client]
            self._send(client, PrefixChanges(number, b"".join(stored), b"".join(removed), is_first))
