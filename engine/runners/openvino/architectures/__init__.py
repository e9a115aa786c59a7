"""One file for each model family: how it reads its `config.json`, and how its decoder's graph is made."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures import gemma, llama, olmo, qwen
from engine.runners.openvino.config.config_file import ConfigFile, read_eos_token_ids, read_json
from engine.runners.openvino.config.decoder_config import DecoderConfig
from engine.runners.openvino.graph.decoder import Architecture
from sluice.errors import ErrorCode, SluiceError, invalid

ARCHITECTURES: dict[str, Architecture] = {
    "arcee": llama.ARCEE,
    "ernie4_5": llama.ERNIE4_5,
    "exaone4": olmo.EXAONE4,
    "gemma": gemma.GEMMA,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "granite": llama.GRANITE,
    "helium": llama.HELIUM,
    "llama": llama.LLAMA,
    "ministral": llama.MINISTRAL,
    "ministral3": llama.MINISTRAL3,
    "mistral": llama.MISTRAL,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "phi3": llama.PHI3,
    "qwen2": qwen.QWEN2,
    "qwen3": qwen.QWEN3,
    "seed_oss": llama.SEED_OSS,
    "smollm3": llama.SMOLLM3,
    "stablelm": llama.STABLELM,
    "starcoder2": llama.STARCODER2,
}


def find_architecture(model_type: str) -> Architecture:
    """The family called `model_type` in config.json. Raises SluiceError(UNIMPLEMENTED) for others."""
    try:
        return ARCHITECTURES[model_type]
    except KeyError:
        raise SluiceError(
            ErrorCode.UNIMPLEMENTED,
            f"model_type {model_type!r} is not among those built from a checkpoint: {', '.join(ARCHITECTURES)}; "
            "others are converted at load where the extra for it is installed: pip install 'sluice[convert]'",
            param="model_path",
        ) from None


__all__ = ["ModelConfig", "read_eos_token_ids", "read_json", "read_model_config", "read_model_type"]

_WITH_TEXT_PART = ("gemma3", "mistral3")
"""Models of text and images; the text part is served."""


def read_model_type(directory: Path) -> str:
    """The family that a checkpoint belongs to, which decides what else must stand in its config.json.

    Raises SluiceError: NOT_FOUND without a config.json, INVALID where it names none.
    """
    path = directory / "config.json"
    model_type = _text_part(read_json(path)).get("model_type")
    if not isinstance(model_type, str):
        raise invalid("model_path", f"{path} has no model_type; it must name the model's architecture")
    return model_type


def read_decoder_config(directory: Path) -> DecoderConfig:
    """Read a checkpoint's configuration.

    Raises SluiceError: NOT_FOUND without a config.json, INVALID where a field is missing or
    malformed, UNIMPLEMENTED for what the graph builder cannot express.
    """
    family = find_architecture(read_model_type(directory))
    path = directory / "config.json"
    file = ConfigFile(_text_part(read_json(path)), path)
    return replace(family.configure(file), eos_token_ids=read_eos_token_ids(directory, file))


def _text_part(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model, which stand in a section where there is another model beside it."""
    text = fields.get("text_config")
    if fields.get("model_type") not in _WITH_TEXT_PART or not isinstance(text, dict):
        return fields
    shared = {name: fields.get(name) for name in ("eos_token_id", "quantization_config")}
    return {**shared, **text, "tie_word_embeddings": fields.get("tie_word_embeddings", True)}
