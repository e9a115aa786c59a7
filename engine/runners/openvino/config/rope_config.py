"""The rope sections of a `config.json`: transformers 5's `rope_parameters` and the older spellings."""

from typing import Any

import msgspec

from engine.runners.openvino.config.rope import DEFAULT_THETA, Rope
from sluice.errors import ErrorCode, SluiceError, invalid

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
