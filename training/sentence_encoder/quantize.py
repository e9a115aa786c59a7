"""Quantizes weights to int8 with a scale for each output channel, after smoothing the inputs' large channels.

A few channels of a transformer's activations are ten times larger than the others, and one scale for all channels of a
token then rounds the others away. SmoothQuant (Xiao et al. 2022) divides those channels of the input and multiplies
their weights by the same factor, which changes nothing before rounding. Their maxima are measured on a few texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.sentence_encoder.checkpoint import Floats, Linear

LEVELS = 127
_SMOOTHING = 0.5
"""Share of the difficulty that moves from activations to weights; the paper's default."""
_LEAST_MAXIMUM = 1e-3
_LEAST_WEIGHT = 1e-5
_SIGNIFICANT_DIGITS = 3
"""Digits of the maxima to keep. Float kernels of other machines differ in later digits, and the export must not."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A matrix: `values` [rows, columns] times `scales`."""

    values: NDArray[np.int8]
    scales: Floats


@dataclass(frozen=True, slots=True)
class Int8Linear:
    """`y = (x * input_factors + shift) @ weight + bias`, where `bias` has taken the shift back out."""

    weight: Int8Matrix
    bias: Floats
    input_factors: Floats
    shift: Floats


def by_column(weights: Floats) -> Int8Matrix:
    """Quantize weights with a scale for each output channel, [columns]."""
    scales = (np.abs(weights).max(axis=0) / LEVELS).astype(np.float32)
    return Int8Matrix(_rounded(weights / scales), scales)


def by_row(table: Floats) -> Int8Matrix:
    """Quantize an embedding table with a scale for each row, [rows, 1]."""
    scales = (np.abs(table).max(axis=1, keepdims=True) / LEVELS).astype(np.float32)
    return Int8Matrix(_rounded(table / scales), scales)


def smoothed(linear: Linear, input_maxima: Floats, input_floor: float = 0.0) -> Int8Linear:
    """Smooth and quantize a layer. With a known lower bound (`input_floor`), the inputs need no sign bit."""
    factors = _smoothing_factors(linear.weight, input_maxima)
    weight = by_column((linear.weight * factors[:, None]).astype(np.float32))
    shift = (-input_floor / factors).astype(np.float32)
    restored = weight.values.astype(np.float32) * weight.scales
    return Int8Linear(weight, (linear.bias - shift @ restored).astype(np.float32), np.reciprocal(factors), shift)


def _smoothing_factors(weights: Floats, input_maxima: Floats) -> Floats:
    maxima = np.maximum(_to_significant_digits(input_maxima), _LEAST_MAXIMUM)
    largest = np.maximum(np.abs(weights).max(axis=1), _LEAST_WEIGHT)
    factors = maxima**_SMOOTHING / largest ** (1 - _SMOOTHING)
    return np.asarray(factors / np.exp(np.log(factors).mean()), np.float32)


def _to_significant_digits(values: Floats) -> Floats:
    digits = [float(f"{value:.{_SIGNIFICANT_DIGITS - 1}e}") for value in values.tolist()]
    return np.array(digits, np.float32)


def _rounded(values: Floats) -> NDArray[np.int8]:
    return np.clip(np.round(values), -LEVELS, LEVELS).astype(np.int8)
