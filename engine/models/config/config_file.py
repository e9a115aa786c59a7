"""Reads `config.json`: fields, layers and ropes that families share. Their own are read under `architectures/`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from sluice.engine.model_folder import read_json
from sluice.engine.models.config.decoder_config import ACTIVATIONS, DecoderConfig, Layer
from sluice.engine.models.config.rope import DEFAULT_THETA, Rope
from sluice.errors import ErrorCode, SluiceError, invalid

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
TokenIds = int | list[int] | None
T = TypeVar("T")
FULL, SLIDING = "full_attention", "sliding_attention"
"""Layer types."""
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")
_OLD_ROPE_TYPES = {"su": "longrope"}


class _CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that all families share. Names are transformers'; defaults of a family override these."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_nextn_predict_layers: Annotated[int, msgspec.Meta(ge=0)] | None = None
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None


class WindowFields(msgspec.Struct, frozen=True):
    """The window of several families, and which layers have it."""

    sliding_window: int | None = 4096
    layer_types: list[str] | None = None


class _EosField(msgspec.Struct, frozen=True):
    eos_token_id: TokenIds = None


class ConfigFile:
    """The fields of one `config.json`; `path` is for messages."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self.fields = fields
        self.path = path

    def with_defaults(self, **defaults: Any) -> "ConfigFile":
        """Return the file with these values for missing fields; an explicit null stays."""
        return ConfigFile({**defaults, **self.fields}, self.path)

    def with_values(self, **values: Any) -> "ConfigFile":
        """Return the file with these values, whatever it says."""
        return ConfigFile({**self.fields, **values}, self.path)

    def without_ropes(self) -> "ConfigFile":
        """Return the file without ropes, for families that read the ropes of their kinds of layers themselves."""
        return self.with_values(rope_parameters=None, rope_scaling=None)

    def read(self, kind: type[T]) -> T:
        """Return the fields that `kind` names. Raises SluiceError INVALID if one is missing or malformed."""
        try:
            return msgspec.convert(self.fields, kind)
        except msgspec.ValidationError as error:
            raise invalid("model_path", f"{self.path}: {error}") from error

    def flag(self, name: str) -> bool:
        """Return a Boolean field; False if it is missing or null."""
        value = self.fields.get(name)
        if not isinstance(value, bool | None):
            raise invalid("model_path", f"{self.path}: {name} must be true or false, got {value!r}")
        return bool(value)


def base_config(
    file: ConfigFile, *, theta: float = DEFAULT_THETA, partial: float | None = None, own_activation: str | None = None
) -> DecoderConfig:
    """Make a configuration of the common fields: full attention in every layer, one rope, no biases. `theta` and
    `partial` are the family's defaults for the rope (see `read_rope`), `own_activation` is one that it has beside the
    common ones. Raises INVALID if a field is missing or malformed, UNIMPLEMENTED for an option that no family
    supports."""
    common = file.read(_CommonFields)
    _check_supported(common, own_activation)
    num_kv_heads = common.num_key_value_heads or common.num_attention_heads
    head_dim = common.head_dim or common.hidden_size // common.num_attention_heads
    _check_heads(common.num_attention_heads, num_kv_heads, head_dim)
    rope = read_rope(file.fields, theta=theta, partial=partial)
    return DecoderConfig(
        model_type=file.fields["model_type"],
        vocab_size=common.vocab_size,
        hidden_size=common.hidden_size,
        intermediate_size=common.intermediate_size,
        num_heads=common.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        layers=(Layer(rope=rope),) * common.num_hidden_layers,
        num_draft_layers=common.num_nextn_predict_layers or 0,
        max_position_embeddings=common.max_position_embeddings,
        norm_eps=common.rms_norm_eps,
        activation=common.hidden_act,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        tie_word_embeddings=common.tie_word_embeddings,
        attention_scale=head_dim**-0.5,
    )


def with_window(config: DecoderConfig, window: int | None) -> DecoderConfig:
    """Return the configuration with the same sliding window in every layer."""
    return replace(config, layers=tuple(Layer(rope=layer.rope, window=window) for layer in config.layers))


def make_layers(
    config: DecoderConfig, kinds: Sequence[str], window: int | None, ropes: Mapping[str, Rope | None] | None = None
) -> tuple[Layer, ...]:
    """Return the layers of `config` with the given kinds, each FULL or SLIDING, and `ropes` by kind if they differ.
    Raises SluiceError for an unknown kind, for too few kinds, and for sliding layers without a window."""
    if len(kinds) < config.num_layers:
        raise invalid("model_path", f"config.json: layer_types names {len(kinds)} layers of {config.num_layers}")
    for kind in kinds:
        if kind not in (FULL, SLIDING):
            raise unsupported(f"layer type {kind!r} is not supported; supported: {FULL}, {SLIDING}")
    if window is None and SLIDING in kinds:
        raise invalid("model_path", f"config.json: layers are {SLIDING}, but there is no sliding_window")
    return tuple(
        Layer(rope=ropes[kind] if ropes else layer.rope, window=window if kind == SLIDING else None)
        for layer, kind in zip(config.layers, kinds, strict=False)
    )


def every_nth_full(num_layers: int, period: int) -> list[str]:
    """Return layer types of which each `period`-th is FULL and the others SLIDING."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]


def read_rope(config: dict[str, Any], *, theta: float = DEFAULT_THETA, partial: float | None = None) -> Rope:
    """Read the rope that all layers share. `theta` is the family's default. `partial` is the default fraction of a head
    that is rotated, None in families that rotate whole heads. Raises UNIMPLEMENTED for an unsupported kind, INVALID for
    a malformed one."""
    return _make_rope(config, rope_section(config), config.get("rope_theta") or theta, partial)


def rope_section(config: dict[str, Any]) -> dict[str, Any]:
    """Return the section that describes a rope of all layers."""
    section: dict[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return section


def read_ropes(config: dict[str, Any], *, full_theta: float, sliding_theta: float) -> dict[str, Rope | None]:
    """Read the ropes of a family whose full and sliding layers have different ones, by layer type. The thetas are the
    family's defaults. In the older format only the full layers are scaled."""
    sections = config.get("rope_parameters") or {}
    full = {**(sections.get(FULL) or {}), **(config.get("rope_scaling") or {})}
    sliding = sections.get(SLIDING) or {}
    return {
        FULL: _make_rope(config, full, config.get("rope_theta") or full_theta, None),
        SLIDING: _make_rope(config, sliding, sliding_theta, None),
    }


def _make_rope(config: dict[str, Any], section: dict[str, Any], theta: float, partial: float | None) -> Rope:
    kind = section.get("rope_type") or section.get("type") or "default"
    kind = _OLD_ROPE_TYPES.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise unsupported(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    fields = {
        **section,
        **_context_lengths(config, section),
        "rope_type": kind,
        "rope_theta": section.get("rope_theta") or theta,
        "partial_rotary_factor": _partial_factor(config, section, kind, partial),
    }
    try:
        rope: Rope = msgspec.convert(fields, Rope)
    except msgspec.ValidationError as error:
        raise invalid("model_path", f"config.json, rope of type {kind!r}: {error}") from error
    return rope


def _context_lengths(config: dict[str, Any], section: dict[str, Any]) -> dict[str, Any]:
    """Return the model's context and the trained one, which may be outside of the section."""
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or section.get("original_max_position_embeddings")
    return {"max_position_embeddings": longest, "original_max_position_embeddings": original or longest}


def _partial_factor(config: dict[str, Any], section: dict[str, Any], kind: str, partial: float | None) -> float:
    share: float | None = section.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share is None:
        return 1.0 if partial is None else partial
    if share != 1.0 and partial is None and kind != "proportional":
        raise unsupported(f"partial_rotary_factor {share} is not supported in this family; supported: 1.0")
    return share


def read_eos_token_ids(directory: Path, file: ConfigFile) -> tuple[int, ...]:
    """Return the end-of-sequence ids of generation_config.json, else of config.json, as transformers does."""
    eos = file.read(_EosField).eos_token_id
    path = directory / "generation_config.json"
    if path.exists():
        generation = ConfigFile(read_json(path), path).read(_EosField)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def unsupported(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")


def _check_supported(common: _CommonFields, own_activation: str | None) -> None:
    if common.quantization_config is not None:
        method = common.quantization_config.get("quant_method", "unknown")
        raise unsupported(f"quantized checkpoints are not supported (this one: {method}); supported: bf16, f16, f32")
    if common.hidden_act not in ACTIVATIONS and common.hidden_act != own_activation:
        supported = ", ".join(ACTIVATIONS)
        raise unsupported(f"hidden_act {common.hidden_act!r} is not supported; supported: {supported}")


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise invalid(
            "model_path",
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})",
        )
    if head_dim % 2:
        raise invalid("model_path", f"config.json: head_dim must be even, got {head_dim}")
