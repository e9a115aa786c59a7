"""Rotary position embeddings: the frequencies of each kind.

Some kinds depend on the length of a sequence. transformers uses the length of each call, so that the same prompt gets
other keys in other chunks. Cached blocks outlive a call and are shared between sequences, so here all sequences use the
longest length that the engine serves (`max_model_len`). transformers computes the same for a sequence of that length
(dynamic), or for any on the same side of the trained length (longrope).
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from sluice.engine.arrays import FloatArray
from sluice.errors import invalid

Frequencies = NDArray[np.float64]
DEFAULT_THETA = 10_000.0


class DefaultRope(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="default"):
    """Frequencies decrease geometrically from 1 towards 1 / theta."""

    rope_theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    """Fraction of a head, from its first component on, that is rotated."""

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        """Return radians per position, [rotary_dim / 2]."""
        return geometric_frequencies(self.rope_theta, self.rotary_dim(head_dim))

    def amplitude(self, max_model_len: int) -> float:
        """Return the factor of the rotated components."""
        return 1.0

    def longest(self, max_position_embeddings: int) -> int:
        """Return the most positions supported, for a model made for `max_position_embeddings`."""
        return max_position_embeddings


class LinearRope(DefaultRope, frozen=True, kw_only=True, tag="linear"):
    """Positions are divided by `factor`, so that a longer context covers the trained angles."""

    factor: float

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        return geometric_frequencies(self.rope_theta, self.rotary_dim(head_dim)) / self.factor


class ProportionalRope(DefaultRope, frozen=True, kw_only=True, tag="proportional"):
    """Frequencies decrease over the whole head; those beyond the rotated fraction are 0."""

    factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        return head_dim

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        frequencies = geometric_frequencies(self.rope_theta, head_dim) / self.factor
        frequencies[int(self.partial_rotary_factor * head_dim // 2) :] = 0
        return frequencies


class DynamicRope(DefaultRope, frozen=True, kw_only=True, tag="dynamic"):
    """Theta grows with the context beyond the trained one (NTK-aware scaling)."""

    factor: float
    max_position_embeddings: int

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        dim = self.rotary_dim(head_dim)
        stretch = max(max_model_len / self.max_position_embeddings, 1.0)
        growth = self.factor * stretch - (self.factor - 1)
        return geometric_frequencies(self.rope_theta * growth ** (dim / (dim - 2)), dim)

    def longest(self, max_position_embeddings: int) -> int:
        return int(self.factor * max_position_embeddings)


class YarnRope(DefaultRope, frozen=True, kw_only=True, tag="yarn"):
    """Slow frequencies are divided by `factor`, fast ones kept, with a ramp between them."""

    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    truncate: bool = True

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        dim = self.rotary_dim(head_dim)
        first, last = self._ramp(dim)
        squeezed = np.clip((np.arange(dim // 2) - first) / (last - first), 0, 1)
        kept = geometric_frequencies(self.rope_theta, dim)
        blended: Frequencies = kept * (1 - squeezed) + kept / self._factor * squeezed
        return blended

    def amplitude(self, max_model_len: int) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self._factor, self.mscale) / _yarn_scale(self._factor, self.mscale_all_dim)
        return _yarn_scale(self._factor, 1.0)

    def scale_of_all(self) -> float:
        """Return the factor of components that are not rotated, by `mscale_all_dim`."""
        return _yarn_scale(self._factor, self.mscale_all_dim or 0.0)

    @property
    def _factor(self) -> float:
        return self.factor or self.max_position_embeddings / self.original_max_position_embeddings

    def _ramp(self, dim: int) -> tuple[float, float]:
        """Return the components where the ramp starts and ends."""
        first = self._component(self.beta_fast or 32.0, dim)
        last = self._component(self.beta_slow or 1.0, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        return first, last if last != first else last + 0.001

    def _component(self, turns: float, dim: int) -> float:
        """Return the component that makes that many turns over the trained context."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(self.rope_theta))


class LongRope(DefaultRope, frozen=True, kw_only=True, tag="longrope"):
    """Each frequency has a divisor, from one list within the trained context and another beyond it (Phi-3)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    def is_long(self, max_model_len: int) -> bool:
        """Return whether the divisors are those for contexts beyond the trained one."""
        return max_model_len > self.original_max_position_embeddings

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        divisors = self.long_factor if self.is_long(max_model_len) else self.short_factor
        kept = geometric_frequencies(self.rope_theta, self.rotary_dim(head_dim))
        if len(divisors) != len(kept):
            raise invalid("model_path", f"config.json: longrope needs {len(kept)} factors, got {len(divisors)}")
        divided: Frequencies = kept / np.array(divisors)
        return divided

    def amplitude(self, max_model_len: int) -> float:
        stated = self.long_mscale if self.is_long(max_model_len) else self.short_mscale
        if stated is not None:
            return stated
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or self.max_position_embeddings / self.original_max_position_embeddings
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position_embeddings))


class Llama3Rope(DefaultRope, frozen=True, kw_only=True, tag="llama3"):
    """Slow frequencies are divided by `factor`, fast ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        frequencies = geometric_frequencies(self.rope_theta, self.rotary_dim(head_dim))
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        blended: Frequencies = (1 - kept) * frequencies / self.factor + kept * frequencies
        return blended


Rope = DefaultRope | LinearRope | ProportionalRope | DynamicRope | YarnRope | LongRope | Llama3Rope


def geometric_frequencies(theta: float, dim: int) -> Frequencies:
    """Return frequencies from 1 towards 1 / theta, [dim / 2]."""
    return np.power(theta, -np.arange(0, dim, 2, dtype=np.float64) / dim)


def inverse_frequencies(rope: Rope, head_dim: int, max_model_len: int) -> FloatArray:
    """Return radians per position, [rotary_dim / 2] float32. Component i rotates with component i + rotary_dim / 2."""
    return rope.frequencies(head_dim, max_model_len).astype(np.float32)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
