"""Weights as int8, one scale an output channel, with the inputs' large channels made small first.

A few channels of a transformer's activations are ten times larger than the others, and one scale for all of a token's
channels then rounds the others away. SmoothQuant (Xiao et al. 2022) divides those channels of the input and multiplies
their weights by the same factor, which changes nothing before rounding. How large they are was seen on a few texts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from training.sentence_encoder.checkpoint import Floats, Linear

LEVELS = 127
_SMOOTHING = 0.5
"""How much of the difficulty goes from activations to weights; the paper's own middle."""
_LEAST_MAXIMUM = 1e-3
_LEAST_WEIGHT = 1e-5
_SIGNIFICANT_DIGITS = 3
"""Of the maxima seen: other machines' float kernels differ in later ones, and the export shall not."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """`values` [rows, columns] times `scales` is what they stand for."""

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
    """One scale an output channel, [columns]."""
    scales = (np.abs(weights).max(axis=0) / LEVELS).astype(np.float32)
    return Int8Matrix(_rounded(weights / scales), scales)


def by_row(table: Floats) -> Int8Matrix:
    """One scale a row, [rows, 1]: of an embedding table."""
    scales = (np.abs(table).max(axis=1, keepdims=True) / LEVELS).astype(np.float32)
    return Int8Matrix(_rounded(table / scales), scales)


def smoothed(linear: Linear, input_maxima: Floats, input_floor: float = 0.0) -> Int8Linear:
    """`input_floor` is what no input goes below, where that is known: shifted up by it, inputs need no sign bit."""
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
