"""Locally typical sampling (Meister et al. 2022, arXiv 2202.00666), as in transformers' TypicalLogitsWarper.

It keeps the tokens whose surprise, -log(probability), is nearest to the entropy, until they have `typical_p`. With s
for the scaled logit, the logarithm of the weight, surprise is log(mass) - s and entropy log(mass) - mean(s): their
distance is |s - mean(s)|.
"""

import numpy as np

from sluice.engine.arrays import FloatArray

_TINY = np.finfo(np.float32).tiny


def logarithm(weights: FloatArray, out: FloatArray | None = None) -> FloatArray:
    """Return the logarithm, finite for a weight of 0 too, so that their product is 0."""
    logs: FloatArray = np.maximum(weights, _TINY, out=out)
    return np.log(logs, out=logs)
