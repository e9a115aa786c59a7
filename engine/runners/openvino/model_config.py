"""`config.json` and `generation_config.json` of a checkpoint, checked and typed."""

from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec

from engine.errors import ErrorCode, SluiceError, invalid
from engine.runners.openvino.rope import Rope, read_rope

PositiveInt = Annotated[int, msgspec.Meta(gt=0)]
TokenIds = int | list[int] | None
T = TypeVar("T")


class _ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    """The fields of `config.json` that decide the graph; names and defaults are transformers'."""

    model_type: str
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: float
    num_key_value_heads: PositiveInt | None = None
    head_dim: PositiveInt | None = None
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    quantization_config: dict[str, Any] | None = None
    eos_token_id: TokenIds = None


class _GenerationFile(msgspec.Struct, frozen=True, kw_only=True):
    eos_token_id: TokenIds = None


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's shape, with every default resolved."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    rope: Rope
    eos_token_ids: tuple[int, ...]


def read_model_type(directory: Path) -> str:
    """The family that a checkpoint belongs to, which decides what else must stand in its config.json.

    Raises SluiceError: NOT_FOUND without a config.json, INVALID where it names none.
    """
    path = directory / "config.json"
    model_type = _read_json(path).get("model_type")
    if not isinstance(model_type, str):
        raise invalid("model_path", f"{path} has no model_type; it must name the model's architecture")
    return model_type


def read_model_config(directory: Path) -> ModelConfig:
    """Read a checkpoint's configuration.

    Raises SluiceError: NOT_FOUND without a config.json, INVALID where a field is missing or
    malformed, UNIMPLEMENTED for what the graph builder cannot express.
    """
    path = directory / "config.json"
    raw = _read_json(path)
    file = _convert(raw, _ConfigFile, path)
    _check_supported(file)
    num_kv_heads = file.num_key_value_heads or file.num_attention_heads
    head_dim = file.head_dim or file.hidden_size // file.num_attention_heads
    _check_heads(file.num_attention_heads, num_kv_heads, head_dim)
    return ModelConfig(
        model_type=file.model_type,
        vocab_size=file.vocab_size,
        hidden_size=file.hidden_size,
        intermediate_size=file.intermediate_size,
        num_layers=file.num_hidden_layers,
        num_heads=file.num_attention_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=file.max_position_embeddings,
        rms_norm_eps=file.rms_norm_eps,
        attention_bias=file.attention_bias,
        mlp_bias=file.mlp_bias,
        tie_word_embeddings=file.tie_word_embeddings,
        rope=read_rope(raw),
        eos_token_ids=_eos_token_ids(directory, file),
    )


def _check_supported(file: _ConfigFile) -> None:
    if file.quantization_config is not None:
        method = file.quantization_config.get("quant_method", "unknown")
        raise _unsupported(f"quantized checkpoints are not supported (this one: {method}); supported: bf16, f16, f32")
    if file.hidden_act != "silu":
        raise _unsupported(f"hidden_act {file.hidden_act!r} is not supported; supported: silu")
    if file.use_sliding_window:
        raise _unsupported("use_sliding_window true is not supported; supported: false")


def _check_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    if num_heads % num_kv_heads:
        raise invalid(
            "model_path",
            f"config.json: num_attention_heads ({num_heads}) must be a multiple of "
            f"num_key_value_heads ({num_kv_heads})",
        )
    if head_dim % 2:
        raise invalid("model_path", f"config.json: head_dim must be even, got {head_dim}")


def _eos_token_ids(directory: Path, file: _ConfigFile) -> tuple[int, ...]:
    """generation_config.json's where it names any, as `generate` of transformers has it, else config.json's."""
    eos = file.eos_token_id
    path = directory / "generation_config.json"
    if path.exists():
        generation = _convert(_read_json(path), _GenerationFile, path)
        eos = generation.eos_token_id if generation.eos_token_id is not None else eos
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(eos)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} does not exist", param="model_path") from error
    except msgspec.DecodeError as error:
        raise invalid("model_path", f"{path} is not a JSON object: {error}") from error


def _convert(raw: dict[str, Any], kind: type[T], path: Path) -> T:
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise invalid("model_path", f"{path}: {error}") from error


def _unsupported(message: str) -> SluiceError:
    return SluiceError(ErrorCode.UNIMPLEMENTED, message, param="model_path")
