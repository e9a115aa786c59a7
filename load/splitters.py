"""Splits the body of an answer into its events, wherever the network cut it."""

from sluice.load.apis import Framing


class EventSplitter:
    """Splits a response body into the data of server-sent events, wherever the network cut it.

    Carriage returns are dropped: JSON escapes its own, so any on the wire belong to line ends.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that `piece` completes, without comments and empty events."""
        if not self._pending and _is_one_event(piece):
            return [piece[6:-2]]
        if b"\r" in piece:
            piece = piece.replace(b"\r", b"")
        *blocks, self._pending = (self._pending + piece).split(b"\n\n")
        return [data for block in blocks if (data := _event_data(block))]

    @property
    def is_between_events(self) -> bool:
        """Return whether all bytes so far belong to complete events."""
        return not self._pending.strip()


class LineSplitter:
    """Splits a response body of JSON lines."""

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """Return every line that `piece` completes, without empty ones."""
        *lines, self._pending = (self._pending + piece).split(b"\n")
        return [line for line in lines if line.strip()]

    @property
    def is_between_events(self) -> bool:
        return not self._pending.strip()


class WholeBody:
    """Keeps a response body until its end."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return no event: the end of the body is known to who reads the response."""
        self._pieces.append(piece)
        return []

    @property
    def is_between_events(self) -> bool:
        return True

    def take(self) -> bytes:
        return b"".join(self._pieces)


Splitter = EventSplitter | LineSplitter | WholeBody
SPLITTERS: dict[Framing, type[Splitter]] = {
    Framing.SSE: EventSplitter,
    Framing.JSON_LINES: LineSplitter,
    Framing.WHOLE: WholeBody,
}


def _is_one_event(piece: bytes) -> bool:
    """Return whether the piece is one whole event of one line, the usual case: to ask takes a third of a split."""
    return piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.find(b"\n") == len(piece) - 2


def _event_data(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = (line for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
