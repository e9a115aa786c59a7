"""Server-sent events out of a byte stream, as cheaply as Python can."""


class EventSplitter:
    """Cuts the pieces of a response body into events' data, wherever the network cut them.

    Carriage returns are dropped: JSON escapes its own, so any on the wire belong to line ends.
    """

    def __init__(self) -> None:
        self._pending = b""

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of every event that `piece` completes; comments and empty events are left out."""
        if not self._pending and _is_one_event(piece):
            return [piece[6:-2]]
        if b"\r" in piece:
            piece = piece.replace(b"\r", b"")
        *blocks, self._pending = (self._pending + piece).split(b"\n\n")
        return [data for block in blocks if (data := _data_of(block))]

    @property
    def is_between_events(self) -> bool:
        """Whether everything fed so far belonged to complete events."""
        return not self._pending.strip()


def _is_one_event(piece: bytes) -> bool:
    """The usual case, told at a third of the general way's cost: one event, one line, nothing cut."""
    return piece.startswith(b"data: ") and piece.endswith(b"\n\n") and piece.find(b"\n") == len(piece) - 2


def _data_of(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = (line for line in block.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(line[5:].removeprefix(b" ") for line in lines)
