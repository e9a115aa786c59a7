"""Locally typical sampling (Meister et al. 2022, arXiv 2202.00666), as transformers' TypicalLogitsWarper has it.

Those tokens stay whose surprise, -log(probability), is nearest to the entropy, until they hold `typical_p`. With s for
the scaled logit, the logarithm of the weight, surprise is log(mass) - s and entropy log(mass) - mean(s): their distance
is |s - mean(s)|.
"""

import numpy as np

from engine.runners.base import FloatArray
from engine.sampling.inversion import Numbers


def mean_of(weights: FloatArray, mass: Numbers) -> Numbers:
    """Expectation [n] of the logarithm of the weights [n, width], which sum up to `mass`."""
    mean: Numbers = (weights * _logarithm(weights)).sum(axis=1, dtype=np.float64) / mass
    return mean


def keep_typical(weights: FloatArray, wanted: Numbers, mean: Numbers) -> tuple[FloatArray, FloatArray]:
    """The weights [n, width] nearest to `mean` that hold `wanted`, 0 for the others, and how far off they reach."""
    distance = np.abs(_logarithm(weights) - mean[:, None].astype(np.float32))
    order = np.argsort(distance, axis=1)
    held = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
    last = np.minimum(np.count_nonzero(held < wanted[:, None], axis=1), weights.shape[1] - 1)
    rows = np.arange(len(order))
    farthest: FloatArray = distance[rows, order[rows, last]]
    return weights * (distance <= farthest[:, None]), farthest


def _logarithm(weights: FloatArray) -> FloatArray:
    """Of a weight of 0 it is finite too, so that the product of both is 0."""
    logarithm: FloatArray = np.log(np.maximum(weights, np.finfo(np.float32).tiny))
    return logarithm
