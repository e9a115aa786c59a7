"""Distributions that an engine counts: of its steps, and of the waits and prefills of its sequences.

All counts and sums are one flat array of float64, which frames carry as bytes: a frame with 600 bytes more costs less
than one with a list of numbers, and arrays of several engines are added element by element.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 10.0)
_WAIT_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)
_SEQUENCES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


class EngineHistogram(NamedTuple):
    """One distribution: its name, and its inclusive upper bounds without infinity."""

    name: str
    bounds: Sequence[float]


STEP_SECONDS = EngineHistogram("step_seconds", _SECONDS)
STEP_SEQUENCES = EngineHistogram("step_sequences", _SEQUENCES)
STEP_TOKENS = EngineHistogram("step_tokens", _TOKENS)
QUEUE_SECONDS = EngineHistogram("queue_seconds", _WAIT_SECONDS)
PREFILL_SECONDS = EngineHistogram("prefill_seconds", _WAIT_SECONDS)
HISTOGRAMS = (STEP_SECONDS, STEP_SEQUENCES, STEP_TOKENS, QUEUE_SECONDS, PREFILL_SECONDS)
_WIDTHS = [len(each.bounds) + 2 for each in HISTOGRAMS]
"""Each distribution's elements: a count for each bound, one for what is above them, and the sum of the values."""
STARTS = dict(zip(HISTOGRAMS, (sum(_WIDTHS[:n]) for n in range(len(_WIDTHS))), strict=True))
"""The place of each distribution's first element."""
SIZE = sum(_WIDTHS)


class Distribution(NamedTuple):
    """The counts of one distribution: `counts` by bucket, not cumulative, the one above all bounds last."""

    histogram: EngineHistogram
    counts: list[float]
    total: float


def unpack(packed: bytes) -> list[Distribution]:
    """Return the distributions of packed counts; all 0 where there are none, or where they are another version's."""
    elements = _elements(packed).tolist()
    found = []
    for each, start in STARTS.items():
        end = start + len(each.bounds) + 1
        found.append(Distribution(each, elements[start:end], elements[end]))
    return found


def add_packed(one: bytes, other: bytes) -> bytes:
    """Return the sums of two packed counts."""
    if not one or not other:
        return one or other
    return (_elements(one) + _elements(other)).tobytes()


def _elements(packed: bytes) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    found = np.frombuffer(packed, np.float64)
    return found if len(found) == SIZE else np.zeros(SIZE)
