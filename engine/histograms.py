"""The histograms that an engine counts: of its steps, and of the waits and prefills of its sequences.

Frames carry them packed, as one array of float64: a frame with 600 bytes more costs less than one with a list of
numbers, and the arrays of several engines are added element by element.
"""

import numpy as np

from sluice.record.histogram import Histogram

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BOUNDS = {
    "step_seconds": _SECONDS,
    "step_sequences": _SEQUENCES,
    "step_tokens": _TOKENS,
    "queue_seconds": _WAIT_SECONDS,
    "prefill_seconds": _WAIT_SECONDS,
}
"""Bounds by name, in the order of the packed form: of each histogram its counts, and then the sum of its values."""
_SIZE = sum(len(bounds) + 2 for bounds in BOUNDS.values())


class EngineHistograms:
    """The histograms of one engine, in the order of BOUNDS. Their counts lie in the packed form: frames are many."""

    def __init__(self) -> None:
        self.all: list[Histogram] = []
        self._packed = bytearray(8 * _SIZE)
        self._numbers = memoryview(self._packed).cast("d")
        self._totals: list[tuple[int, Histogram]] = []
        end = 0
        for bounds in BOUNDS.values():
            start, end = end, end + len(bounds) + 2
            self.all.append(Histogram(bounds, self._numbers[start : end - 1]))
            self._totals.append((end - 1, self.all[-1]))

    def pack(self) -> bytes:
        """Return the packed form."""
        for place, histogram in self._totals:
            self._numbers[place] = histogram.total
        return bytes(self._packed)


def unpack(packed: bytes) -> dict[str, Histogram]:
    """Return packed histograms by name; all 0 where there are none, or where they are another version's."""
    numbers, end, found = _read(packed).tolist(), 0, {}
    for name, bounds in BOUNDS.items():
        start, end = end, end + len(bounds) + 2
        found[name] = Histogram(bounds, numbers[start : end - 1])
        found[name].total = numbers[end - 1]
    return found


def add_packed(one: bytes, other: bytes) -> bytes:
    """Return the sums of two packed forms."""
    if not one or not other:
        return one or other
    return (_read(one) + _read(other)).tobytes()


def _read(packed: bytes) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    found = np.frombuffer(packed, np.float64)
    return found if len(found) == _SIZE else np.zeros(_SIZE)
