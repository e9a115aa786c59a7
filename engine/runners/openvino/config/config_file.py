"""`config.json` as the families read it: common fields here, a family's own in its file under `architectures/`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.config.decoder_config import DecoderConfig, Layer
from engine.runners.openvino.config.rope import DEFAULT_THETA, Rope, read_rope
from engine.runners.openvino.graph.nodes import ACTIVATIONS
from sluice.errors import ErrorCode, SluiceError, invalid

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
T = TypeVar("T")
FULL, SLIDING = "full_attention", "sliding_attention"


class _CommonFields(msgspec.Struct, frozen=True, kw_only=True):
    """Names are transformers'; where families have other defaults, theirs come first."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: float = 1e-6
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    quantization_config: dict[str, Any] | None = None


class ConfigFile:
    """The fields of one `config.json`; `path` is for messages."""

    def __init__(self, fields: dict[str, Any], path: Path) -> None:
        self.fields = fields
        self.path = path

    def with_defaults(self, **defaults: Any) -> "ConfigFile":
        """Fields that the file leaves out have these values; an explicit null stays."""
        return ConfigFile({**defaults, **self.fields}, self.path)

    def with_values(self, **values: Any) -> "ConfigFile":
        """Fields have these values whatever the file says."""
        return ConfigFile({**self.fields, **values}, self.path)

    def without_ropes(self) -> "ConfigFile":
        """For families whose layers have ropes of their own kind, which they read themselves."""
        return self.with_values(rope_parameters=None, rope_scaling=None)

    def read(self, kind: type[T]) -> T:
        """The fields that `kind` names. Raises SluiceError(INVALID) where one is missing or malformed."""
        try:
            return msgspec.convert(self.fields, kind)
        except msgspec.ValidationError as error:
            raise invalid("model_path", f"{self.path}: {error}") from error

    def flag(self, name: str) -> bool:
        """A true or false field; false where it is left out or null."""
        value = self.fields.get(name)
        if not isinstance(value, bool | None):
            raise invalid("model_path", f"{self.path}: {name} must be true or false, got {value!r}")
        return bool(value)


def base_config(file: ConfigFile, *, theta: float = DEFAULT_THETA, partial: float | None = None) -> DecoderConfig:
    """What Llama makes of the common fields: full attention in every layer, one rope, no biases.

    `theta` and `partial` are the family's defaults for the rope (see `read_rope`). Raises SluiceError:
    INVALID where a field is missing or malformed, UNIMPLEMENTED for what no family can express.
    """
    common = file.read(_CommonFields)
    _check_supported(common)
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
    """The same sliding window in every layer."""
    return replace(config, layers=tuple(Layer(rope=layer.rope, window=window) for layer in config.layers))


def layers_of(
    config: DecoderConfig, kinds: Sequence[str], window: int | None, ropes: Mapping[str, Rope | None] | None = None
) -> tuple[Layer, ...]:
    """The layers of `config` as `kinds` says, each FULL or SLIDING; `ropes` by kind, where they differ.

    Raises SluiceError for another kind, for too few, and where layers slide without a window.
    """
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
    """Layer types where each `period`-th layer attends to everything and the others slide."""
    return [FULL if (layer + 1) % period == 0 else SLIDING for layer in range(num_layers)]


def unsupported(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")


def _check_supported(common: _CommonFields) -> None:
    if common.quantization_config is not None:
        method = common.quantization_config.get("quant_method", "unknown")
        raise unsupported(f"quantized checkpoints are not supported (this one: {method}); supported: bf16, f16, f32")
    if common.hidden_act not in ACTIVATIONS:
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


TokenIds = int | list[int] | None


class _EosField(msgspec.Struct, frozen=True):
    eos_token_id: TokenIds = None


def read_eos_token_ids(directory: Path, file: ConfigFile) -> tuple[int, ...]:
    """generation_config.json's where it names any, as `generate` of transformers has it, else config.json's."""
    eos = file.read(_EosField).eos_token_id
    path = directory / "generation_config.json"
    if path.exists():
        generation = ConfigFile(read_json(path), path).read(_EosField)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} does not exist", param="model_path") from error
    except msgspec.DecodeError as error:
        raise invalid("model_path", f"{path} is not a JSON object: {error}") from error
