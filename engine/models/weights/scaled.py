"""Matrices that a checkpoint stores in 8-bit floats, and their scales: the values are codes times scales."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sluice.engine.arrays import FloatArray
from sluice.engine.models.config.stored_fp8 import BLOCK
from sluice.engine.models.weights.mapped import StoredTensor
from sluice.errors import ErrorCode, SluiceError, invalid

FP8 = "F8_E4M3"
_SCALES = ("_scale_inv", "_scale")
"""Suffixes of the names of scales, those of DeepSeek first: values are multiplied by both."""
_OF_INPUTS = (".input_scale", ".activation_scale")
"""Fixed scales of a projection's input. Each token's input gets one of its own, which is at least as exact."""


def attach_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint, those in 8-bit floats with their scales, which are not among the others then.
    Raises INVALID for a matrix without a scale, UNIMPLEMENTED for several matrices in one tensor."""
    found = dict(tensors)
    for name, stored in tensors.items():
        if stored.dtype != FP8:
            continue
        if len(stored.shape) != 2:
            message = (
                f"tensor {name!r} is stored as {FP8} with shape {stored.shape}; only matrices can be, [rows, columns]"
            )
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
        scale = next((found.pop(name + suffix) for suffix in _SCALES if name + suffix in found), None)
        if scale is None:
            raise invalid("model_path", f"tensor {name!r} is stored as {FP8}, but there is no {name}_scale")
        found[name] = replace(stored, scale=scale)
        for suffix in _OF_INPUTS:
            found.pop(name.removesuffix(".weight") + suffix, None)
    return found


def scales_of(name: str, stored: StoredTensor) -> FloatArray:
    """Return the scales of a matrix, [rows, 1], or where columns differ [rows, blocks of columns]. Raises INVALID if
    their shape does not fit."""
    assert stored.scale is not None, f"{name} has no scale"
    scales, (rows, columns) = stored.scale.all_floats(), stored.shape
    if scales.size == 1:
        return np.full((rows, 1), scales.reshape(()), np.float32)
    if scales.shape in ((rows,), (rows, 1)):
        return scales.reshape(rows, 1)
    if scales.shape == (-(-rows // BLOCK), -(-columns // BLOCK)):
        return np.repeat(scales, BLOCK, 0)[:rows]
    raise invalid(
        "model_path", f"tensor {name!r} has shape {stored.shape}, but its scales have {scales.shape}; is it damaged?"
    )
