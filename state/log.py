"""The events of one answer, numbered, for those who follow them: now or when they come back."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from sluice.errors import ErrorCode, SluiceError, invalid

PIECE_OVERHEAD_BYTES = 64
"""Memory of a piece in this process, besides its bytes."""
_PIECES_AT_ONCE = 256
"""Most pieces that a follower gets in one turn: one that comes back to a long stream must not hold up the others."""
_KEPT_PART = 7 / 8
"""Share of a full log that is kept, so that it is not cut at each event."""


class EventLog:
    """The pieces of an answer, which are numbered from 0. Belongs to the event loop.

    It is bounded by bytes: past the bound its first pieces go, and `first` says which is the first one that is left.
    Followers read the same pieces, so that a slow one costs no memory.
    """

    __slots__ = ("_changed", "_count_bytes", "_pieces", "first", "has_ended", "max_bytes", "num_bytes", "takeovers")

    def __init__(self, max_bytes: int | None = None, count_bytes: Callable[[int], None] | None = None) -> None:
        """`max_bytes` None: unbounded. `count_bytes` is called with each change of `num_bytes`."""
        self._pieces: list[bytes] = []
        self.first = 0
        self.num_bytes = 0
        self.has_ended = False
        self.max_bytes = max_bytes
        self._count_bytes = count_bytes
        self.takeovers: list[int] = []
        """The number of pieces at each takeover by another gateway."""
        self._changed: asyncio.Event | None = None
        """Set at the next change; None where nobody waits for it."""

    def __len__(self) -> int:
        """Return the number of all pieces, those no longer kept included."""
        return self.first + len(self._pieces)

    def append(self, pieces: Sequence[bytes]) -> None:
        """Add pieces. Past the bound the first ones go."""
        self._pieces += pieces
        self._grow(sum(map(len, pieces)) + PIECE_OVERHEAD_BYTES * len(pieces))
        if self.max_bytes is not None and self.num_bytes > self.max_bytes:
            self.shrink(int(self.max_bytes * _KEPT_PART))
        self._wake()

    def shrink(self, max_bytes: int) -> None:
        """Drop the first pieces, but never the last one, until there are at most so many bytes."""
        num_bytes, dropped = self.num_bytes, 0
        while num_bytes > max_bytes and dropped < len(self._pieces) - 1:
            num_bytes -= len(self._pieces[dropped]) + PIECE_OVERHEAD_BYTES
            dropped += 1
        del self._pieces[:dropped]
        self.first += dropped
        self._grow(num_bytes - self.num_bytes)

    def note_takeover(self) -> None:
        """Note that another gateway goes on from here: what readers have beyond this is lost, and they are told."""
        self.takeovers.append(len(self))
        self._wake()

    def end(self) -> None:
        """Release the followers: no more pieces come."""
        self.has_ended = True
        self._wake()

    def kept(self) -> list[bytes]:
        """Return the pieces that are kept."""
        return list(self._pieces)

    async def follow(self, start: int, num_takeovers: int | None = None) -> AsyncGenerator[bytes, None]:
        """Yield the pieces from number `start` on, several in one, until the end. Raises as `check`."""
        while True:
            self.check(start, num_takeovers)
            num_takeovers = len(self.takeovers)
            offset = start - self.first
            if offset < len(self._pieces):
                pieces = self._pieces[offset : offset + _PIECES_AT_ONCE]
                start += len(pieces)
                yield b"".join(pieces)
            elif self.has_ended:
                return
            else:
                await self.changed()

    def check(self, start: int, num_takeovers: int | None = None) -> None:
        """Raise NOT_FOUND where pieces from number `start` on were dropped, or pieces before it are lost with the
        gateway that sent them, and INVALID where it is after the end.

        The piece before `start` was sent after `num_takeovers`, None where that is not known. Raises UNAVAILABLE where
        more of them are known there than here: this gateway goes on alone with what another has taken over.
        """
        self._check_takeovers(start, num_takeovers)
        if start < self.first:
            message = f"events {start + 1} to {self.first} of the stream are not kept any more (--stream-max-bytes)"
            raise SluiceError(ErrorCode.NOT_FOUND, message)
        if self.has_ended and start > len(self):
            raise invalid("last-event-id", f"last-event-id must be at most {len(self)}, the stream's last, got {start}")

    def _check_takeovers(self, start: int, num_takeovers: int | None) -> None:
        if num_takeovers is None:
            num_takeovers = 0 if start > len(self) else len(self.takeovers)
        if num_takeovers > len(self.takeovers):
            raise SluiceError(ErrorCode.UNAVAILABLE, "the stream goes on at another gateway", retry_after_s=1)
        num_shared = min(self.takeovers[num_takeovers:], default=start)
        if start > num_shared:
            lost = f"events {num_shared + 1} to {start} of the stream are lost with the gateway that sent them"
            raise SluiceError(ErrorCode.NOT_FOUND, f"{lost}: send the request again")

    async def changed(self) -> None:
        """Wait until pieces or the end come."""
        if self._changed is None:
            self._changed = asyncio.Event()
        await self._changed.wait()

    def _wake(self) -> None:
        changed, self._changed = self._changed, None
        if changed is not None:
            changed.set()

    def _grow(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        if self._count_bytes is not None:
            self._count_bytes(num_bytes)
