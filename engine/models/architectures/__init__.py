"""The model families that are built from a checkpoint: how each reads its `config.json`, and how its decoder's graph is
built. Related families share a file."""

from pathlib import Path
from typing import Any

from msgspec.structs import replace

from sluice.engine.model_folder import read_json
from sluice.engine.models.architectures import deepseek, experts, gemma, lfm2, llama, normed_heads, olmo, parallel
from sluice.engine.models.config.config_file import ConfigFile, read_eos_token_ids
from sluice.engine.models.config.decoder_config import DecoderConfig
from sluice.engine.models.config.stored_fp8 import without_stored_fp8
from sluice.engine.models.decoder import Architecture
from sluice.errors import ErrorCode, SluiceError, invalid

ARCHITECTURES: dict[str, Architecture] = {
    "apertus": normed_heads.APERTUS,
    "arcee": llama.ARCEE,
    "cohere": parallel.COHERE,
    "cohere2": parallel.COHERE2,
    "deepseek_v2": deepseek.DEEPSEEK_V2,
    "deepseek_v3": deepseek.DEEPSEEK_V3,
    "ernie4_5": llama.ERNIE4_5,
    "exaone4": olmo.EXAONE4,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "glm": normed_heads.GLM,
    "glm4": normed_heads.GLM4,
    "glm4_moe": deepseek.GLM4_MOE,
    "gpt2": parallel.GPT2,
    "gpt_neox": parallel.GPT_NEOX,
    "gpt_oss": experts.GPT_OSS,
    "granite": llama.GRANITE,
    "granitemoe": experts.GRANITE_MOE,
    "helium": llama.HELIUM,
    "hunyuan_v1_dense": normed_heads.HUNYUAN,
    "lfm2": lfm2.LFM2,
    "lfm2_moe": lfm2.LFM2_MOE,
    "llama": llama.LLAMA,
    "ministral": llama.MINISTRAL,
    "ministral3": llama.MINISTRAL3,
    "mistral": llama.MISTRAL,
    "mixtral": experts.MIXTRAL,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "olmoe": experts.OLMOE,
    "phi": parallel.PHI,
    "phi3": llama.PHI3,
    "phimoe": experts.PHI_MOE,
    "qwen2": llama.QWEN2,
    "qwen2_moe": experts.QWEN2_MOE,
    "qwen3": llama.QWEN3,
    "qwen3_moe": experts.QWEN3_MOE,
    "seed_oss": llama.SEED_OSS,
    "smollm3": llama.SMOLLM3,
    "stablelm": llama.STABLELM,
    "starcoder2": llama.STARCODER2,
}
"""The architectures by `model_type` of `config.json`."""

_WITH_TEXT_PART = ("gemma3", "mistral3")
"""Types of models of text and images, whose text part is served."""


_WITH_STATES = (
    *("bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h", "recurrent_gemma"),
    *("kimi_linear", "minimax", "olmo_hybrid", "qwen3_5", "qwen3_5_moe", "qwen3_next", "rwkv", "zamba", "zamba2"),
)
"""Types whose layers keep a state of the whole sequence: state spaces, linear attention."""


def check_stateless(model_type: str) -> None:
    """Raise UNIMPLEMENTED for a type that keeps more of a sequence than keys and values of its tokens. OpenVINO 2026.4
    has kernels for some of those (`PagedGatedDeltaNet`, `PagedCausalConv1D`), but no opset of its Python API has them,
    and a step has no place for the state of a sequence."""
    if model_type in _WITH_STATES:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"model_type {model_type!r} is not supported by Sluice's own executor: its layers keep a state of the "
            "whole sequence, and the KV cache has blocks of tokens; use --runtime vllm",
            param="model_path",
        )


def find_architecture(model_type: str) -> Architecture:
    """Return the architecture of `model_type`. Raises SluiceError UNIMPLEMENTED for an unknown one."""
    check_stateless(model_type)
    try:
        return ARCHITECTURES[model_type]
    except KeyError:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"model_type {model_type!r} is not among those built from a checkpoint: {', '.join(ARCHITECTURES)}; "
            "others are converted at load where the extra for it is installed: pip install 'sluice[convert]'",
            param="model_path",
        ) from None


def read_model_type(directory: Path) -> str:
    """Return a checkpoint's model type. Raises NOT_FOUND without a config.json, INVALID without a type in it."""
    path = directory / "config.json"
    model_type = _text_part(read_json(path)).get("model_type")
    if not isinstance(model_type, str):
        raise invalid("model_path", f"{path} has no model_type; it must name the model's architecture")
    return model_type


def read_decoder_config(directory: Path, *, takes_fp8: bool = False) -> DecoderConfig:
    """Read a checkpoint's configuration. Raises NOT_FOUND without a config.json, INVALID if a field is missing or
    malformed, UNIMPLEMENTED for an option that no family supports, and for a quantized checkpoint, unless it
    `takes_fp8` and the checkpoint is stored so."""
    architecture = find_architecture(read_model_type(directory))
    path = directory / "config.json"
    fields = _text_part(read_json(path))
    file = ConfigFile(without_stored_fp8(fields, path) if takes_fp8 else fields, path)
    return replace(architecture.configure(file), eos_token_ids=read_eos_token_ids(directory, file))


def _text_part(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of the text model, which are in a section of their own if there is another model beside it."""
    text = fields.get("text_config")
    if fields.get("model_type") not in _WITH_TEXT_PART or not isinstance(text, dict):
        return fields
    shared = {name: fields.get(name) for name in ("eos_token_id", "quantization_config")}
    return {**shared, **text, "tie_word_embeddings": fields.get("tie_word_embeddings", True)}
