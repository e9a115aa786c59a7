"""Weights in 8 or 4 bits. A weight is (code - zero point) * scale; rows are output features."""

import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray

GROUP = 64
"""Weights that share a scale under int4, along a row. Fewer cost memory, more cost agreement."""

_LEAST_SCALE = np.float32(1e-12)
"""A row of zeros must not divide by its scale."""


def quantize_rows(weights: FloatArray) -> tuple[NDArray[np.int8], FloatArray]:
    """int8, symmetric, one scale a row: codes [rows, columns] and scales [rows, 1]. `weights` is overwritten."""
    largest = np.maximum(weights.max(1, keepdims=True), -weights.min(1, keepdims=True))
    scales = np.maximum(largest / np.float32(127), _LEAST_SCALE)
    weights *= 1 / scales
    return np.rint(weights, out=weights).astype(np.int8), scales


def quantize_groups(weights: FloatArray) -> tuple[NDArray[np.uint8], FloatArray, NDArray[np.uint8]]:
    """int4 with a scale and a zero point for each GROUP weights of a row, which it must divide.

    Returns codes [rows, columns / 2], two in a byte, the first in its lower half; scales and zero points
    [rows, groups, 1], the latter a byte each. `weights` is overwritten.
    """
    grouped = weights.reshape(len(weights), -1, GROUP)
    # Zero stays exact, since rows are often padded with it.
    low = np.minimum(_fold(np.minimum, grouped), 0)
    high = np.maximum(_fold(np.maximum, grouped), 0)
    scales = np.maximum((high - low) / np.float32(15), _LEAST_SCALE)
    zeros = np.rint(-low / scales)
    grouped *= 1 / scales
    grouped += zeros
    codes = np.rint(grouped, out=grouped).clip(0, 15, out=grouped).astype(np.uint8)
    return _packed(codes.reshape(len(weights), -1)), scales, zeros.astype(np.uint8)


def _fold(pairwise: np.ufunc, grouped: FloatArray) -> FloatArray:
    """The last axis reduced to length 1, by halves: numpy's own reduction is ten times slower on short axes."""
    while (width := grouped.shape[2]) > 1:
        grouped = pairwise(grouped[:, :, : width // 2], grouped[:, :, width // 2 :])
    return grouped


def _packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    pairs = codes.view("<u2")  # the first of a pair is the lower byte, and has its upper half free
    packed: NDArray[np.uint8] = (pairs | (pairs >> 4)).astype(np.uint8)
    return packed
