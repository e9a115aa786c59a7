"""Rotary position embedding: which angles a model turns its heads by."""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.errors import ErrorCode, SluiceError, invalid
from engine.runners.base import FloatArray

DEFAULT_THETA = 10_000.0


class DefaultRope(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="default"):
    """Frequencies fall geometrically from 1 towards 1 / theta."""

    rope_theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        return frequencies


class LinearRope(DefaultRope, frozen=True, kw_only=True, tag="linear"):
    """Positions squeezed by `factor`, so that a longer context covers the angles trained on."""

    factor: float

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        return frequencies / self.factor


class Llama3Rope(DefaultRope, frozen=True, kw_only=True, tag="llama3"):
    """Slow frequencies divided by `factor`, fast ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def scale(self, frequencies: NDArray[np.float64]) -> NDArray[np.float64]:
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0, 1)
        return (1 - kept) * frequencies / self.factor + kept * frequencies


Rope = DefaultRope | LinearRope | Llama3Rope
SUPPORTED = ("default", "linear", "llama3")


def read_rope(config: dict[str, Any]) -> Rope:
    """The rope of a `config.json`, in transformers 5's spelling (`rope_parameters`) or the older ones.

    Raises SluiceError: UNIMPLEMENTED for a kind not supported, INVALID for a malformed one.
    """
    section = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = section.get("rope_type", section.get("type", "default"))
    if kind not in SUPPORTED:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}",
            param="model_path",
        )
    theta = section.get("rope_theta", config.get("rope_theta", DEFAULT_THETA))
    try:
        rope: Rope = msgspec.convert({**section, "rope_type": kind, "rope_theta": theta}, Rope)
    except msgspec.ValidationError as error:
        raise invalid("model_path", f"config.json, rope of type {kind!r}: {error}") from error
    if rope.partial_rotary_factor != 1.0:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"partial_rotary_factor {rope.partial_rotary_factor} is not supported; supported: 1.0",
            param="model_path",
        )
    return rope


def inverse_frequencies(rope: Rope, head_dim: int) -> FloatArray:
    """[head_dim / 2] float32, radians a position: component i turns with component i + head_dim / 2."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    return rope.scale(rope.rope_theta**-exponents).astype(np.float32)
