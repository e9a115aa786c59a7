"""Rotary position embedding: which angles a model turns its heads by.

Some kinds depend on how long a sequence is. transformers looks at the length of each call, so that the
same prompt gets other keys in other chunks. Cached blocks outlive a call and are shared between
sequences, so here the length is that of the longest sequence the engine serves (`max_model_len`), for
all of them. That is what transformers computes for a sequence of that length (dynamic), or for any on
the same side of the length trained on (longrope).
"""

import math
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine.runners.base import FloatArray
from sluice.errors import ErrorCode, SluiceError, invalid

Frequencies = NDArray[np.float64]
DEFAULT_THETA = 10_000.0


class DefaultRope(msgspec.Struct, frozen=True, kw_only=True, tag_field="rope_type", tag="default"):
    """Frequencies fall geometrically from 1 towards 1 / theta."""

    rope_theta: float = DEFAULT_THETA
    partial_rotary_factor: float = 1.0
    """Share of a head, from its first component on, that is turned."""

    def rotary_dim(self, head_dim: int) -> int:
        return int(head_dim * self.partial_rotary_factor)

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        """[rotary_dim / 2], radians a position."""
        return falling(self.rope_theta, self.rotary_dim(head_dim))

    def amplitude(self) -> float:
        """What turned components are multiplied by."""
        return 1.0

    def longest(self, max_position_embeddings: int) -> int:
        """The longest sequence it can place, where the model was made for `max_position_embeddings`."""
        return max_position_embeddings


class LinearRope(DefaultRope, frozen=True, kw_only=True, tag="linear"):
    """Positions squeezed by `factor`, so that a longer context covers the angles trained on."""

    factor: float

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        return falling(self.rope_theta, self.rotary_dim(head_dim)) / self.factor


class ProportionalRope(DefaultRope, frozen=True, kw_only=True, tag="proportional"):
    """Frequencies fall over the whole head; those beyond the share that turns are 0."""

    factor: float = 1.0

    def rotary_dim(self, head_dim: int) -> int:
        return head_dim

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        frequencies = falling(self.rope_theta, head_dim) / self.factor
        frequencies[int(self.partial_rotary_factor * head_dim // 2) :] = 0
        return frequencies


class DynamicRope(DefaultRope, frozen=True, kw_only=True, tag="dynamic"):
    """Theta grows with the context beyond the one trained on (NTK-aware scaling)."""

    factor: float
    max_position_embeddings: int

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        dim = self.rotary_dim(head_dim)
        stretch = max(max_model_len / self.max_position_embeddings, 1.0)
        growth = self.factor * stretch - (self.factor - 1)
        return falling(self.rope_theta * growth ** (dim / (dim - 2)), dim)

    def longest(self, max_position_embeddings: int) -> int:
        return int(self.factor * max_position_embeddings)


class YarnRope(DefaultRope, frozen=True, kw_only=True, tag="yarn"):
    """Slow frequencies divided by `factor`, fast ones kept, a ramp over the components between."""

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
        kept = falling(self.rope_theta, dim)
        blended: Frequencies = kept * (1 - squeezed) + kept / self._factor * squeezed
        return blended

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _yarn_scale(self._factor, self.mscale) / _yarn_scale(self._factor, self.mscale_all_dim)
        return _yarn_scale(self._factor, 1.0)

    @property
    def _factor(self) -> float:
        return self.factor or self.max_position_embeddings / self.original_max_position_embeddings

    def _ramp(self, dim: int) -> tuple[float, float]:
        """The components where squeezing sets in and where it is whole."""
        first = self._component(self.beta_fast or 32.0, dim)
        last = self._component(self.beta_slow or 1.0, dim)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        return first, last if last != first else last + 0.001

    def _component(self, turns: float, dim: int) -> float:
        """The component that turns so many times over the context trained on."""
        wavelength = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(self.rope_theta))


class LongRope(DefaultRope, frozen=True, kw_only=True, tag="longrope"):
    """A divisor for each frequency: one list within the context trained on, another beyond it (Phi-3)."""

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    max_position_embeddings: int
    factor: float | None = None
    attention_factor: float | None = None

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        is_long = max_model_len > self.original_max_position_embeddings
        divisors = self.long_factor if is_long else self.short_factor
        kept = falling(self.rope_theta, self.rotary_dim(head_dim))
        if len(divisors) != len(kept):
            raise invalid("model_path", f"config.json: longrope needs {len(kept)} factors, got {len(divisors)}")
        divided: Frequencies = kept / np.array(divisors)
        return divided

    def amplitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        factor = self.factor or self.max_position_embeddings / self.original_max_position_embeddings
        if factor <= 1:
            return 1.0
        return math.sqrt(1 + math.log(factor) / math.log(self.original_max_position_embeddings))


class Llama3Rope(DefaultRope, frozen=True, kw_only=True, tag="llama3"):
    """Slow frequencies divided by `factor`, fast ones kept, those between blended (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, head_dim: int, max_model_len: int) -> Frequencies:
        frequencies = falling(self.rope_theta, self.rotary_dim(head_dim))
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)
        blended: Frequencies = (1 - kept) * frequencies / self.factor + kept * frequencies
        return blended


Rope = DefaultRope | LinearRope | ProportionalRope | DynamicRope | YarnRope | LongRope | Llama3Rope


def falling(theta: float, dim: int) -> Frequencies:
    """[dim / 2], from 1 towards 1 / theta."""
    return np.power(theta, -np.arange(0, dim, 2, dtype=np.float64) / dim)


def inverse_frequencies(rope: Rope, head_dim: int, max_model_len: int) -> FloatArray:
    """[rotary_dim / 2] float32, radians a position: component i turns with component i + rotary_dim / 2."""
    return rope.frequencies(head_dim, max_model_len).astype(np.float32)


def _yarn_scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


SUPPORTED = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_FULL, _SLIDING = "full_attention", "sliding_attention"
_OLD_NAMES = {"su": "longrope"}


def read_rope(config: dict[str, Any], *, theta: float = DEFAULT_THETA, partial: float | None = None) -> Rope:
    """The rope that all layers share. `theta` is the family's default.

    `partial`: the default share of a head that turns, None in families whose heads turn as a whole.
    Raises SluiceError: UNIMPLEMENTED for a kind not supported, INVALID for a malformed one.
    """
    return _make_rope(config, rope_section(config), config.get("rope_theta") or theta, partial)


def rope_section(config: dict[str, Any]) -> dict[str, Any]:
    """Where a rope that all layers share is described."""
    section: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return section


def read_ropes(config: dict[str, Any], *, full_theta: float, sliding_theta: float) -> dict[str, Rope | None]:
    """The ropes of a family whose full and sliding layers have their own, by layer type.

    The thetas are the family's defaults. In the older spelling the full layers alone are scaled.
    """
    sections = config.get("rope_parameters") or {}
    full = {**(sections.get(_FULL) or {}), **(config.get("rope_scaling") or {})}
    sliding = sections.get(_SLIDING) or {}
    return {
        _FULL: _make_rope(config, full, config.get("rope_theta") or full_theta, None),
        _SLIDING: _make_rope(config, sliding, sliding_theta, None),
    }


def _make_rope(config: dict[str, Any], section: dict[str, Any], theta: float, partial: float | None) -> Rope:
    kind = section.get("rope_type") or section.get("type") or "default"
    kind = _OLD_NAMES.get(kind, kind)
    if kind not in SUPPORTED:
        raise _unsupported(f"rope type {kind!r} is not supported; supported: {', '.join(SUPPORTED)}")
    fields = {
        **section,
        **_lengths(config, section),
        "rope_type": kind,
        "rope_theta": section.get("rope_theta") or theta,
        "partial_rotary_factor": _share(config, section, kind, partial),
    }
    try:
        rope: Rope = msgspec.convert(fields, Rope)
    except msgspec.ValidationError as error:
        raise invalid("model_path", f"config.json, rope of type {kind!r}: {error}") from error
    return rope


def _lengths(config: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    """The context the model is made for, and the one it was trained on, which may stand beside the section."""
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
    return {"max_position_embeddings": longest, "original_max_position_embeddings": original or longest}


def _share(config: dict[str, Any], section: dict[str, Any], kind: str, partial: float | None) -> float:
    share: float | None = section.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None:
        return 1.0 if partial is None else partial
    if share != 1.0 and partial is None and kind != "proportional":
        raise _unsupported(f"partial_rotary_factor {share} is not supported in this family; supported: 1.0")
    return share


def _unsupported(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
