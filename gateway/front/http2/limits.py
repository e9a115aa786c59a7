"""Limits of one connection against floods: empty frames, resets, pings and header blocks in many pieces."""

from time import monotonic

from sluice.gateway.front.http2.frames import ConnectionFault, H2ErrorCode

WINDOW_BYTES = 1 << 20
"""Bytes that a client may send on one stream before the server consumes them: its flow-control window."""
CONNECTION_WINDOW_BYTES = 16 << 20
"""The same for all streams of a connection together."""
MAX_STREAMS = 2048
"""Most calls of one connection at a time; clients keep the others back."""
MAX_BLOCK_BYTES = 64 << 10
"""Longest block of header fields, as it comes."""
MAX_BLOCK_FRAMES = 64
"""Most CONTINUATION frames of one block: empty ones would never reach its limit of bytes."""
MAX_UNSENT_ANSWERS = 10_000
"""Most answers to pings and settings that wait for a client that does not read."""
_IDLE_FRAMES, _IDLE_FRAMES_PER_S = 2_000, 200
_RESETS, _RESETS_PER_S = 4_000, 1_000


class Bucket:
    """Lets `burst` events pass at once, and `per_s` in the long run."""

    __slots__ = ("_burst", "_left", "_per_s", "_since", "_what")

    def __init__(self, burst: int, per_s: int, what: str) -> None:
        self._burst = burst
        self._per_s = per_s
        self._what = what
        self._left: float = burst
        self._since = monotonic()

    def take(self) -> None:
        """Count one event. Raises ConnectionFault ENHANCE_YOUR_CALM for one too many."""
        self._left -= 1
        if self._left >= 0:
            return
        now = monotonic()
        self._left += (now - self._since) * self._per_s + 1
        self._since = now
        self._left = min(self._left, self._burst) - 1
        if self._left < 0:
            text = f"more than {self._per_s} {self._what} a second"
            raise ConnectionFault(H2ErrorCode.ENHANCE_YOUR_CALM, text)


def idle_frames() -> Bucket:
    """Return the bucket of frames that ask for nothing: settings, priorities, empty data, frames of unknown types."""
    return Bucket(_IDLE_FRAMES, _IDLE_FRAMES_PER_S, "frames without content")


def resets() -> Bucket:
    """Return the bucket of calls that the client cancels."""
    return Bucket(_RESETS, _RESETS_PER_S, "cancelled calls")
