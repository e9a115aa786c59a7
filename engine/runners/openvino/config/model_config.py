"""`config.json` and `generation_config.json` of a checkpoint, checked and typed."""

from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from engine.runners.openvino.architectures import architecture
from engine.runners.openvino.config.config_file import ConfigFile
from engine.runners.openvino.config.decoder_config import ModelConfig
from sluice.errors import ErrorCode, SluiceError, invalid

__all__ = ["ModelConfig", "read_eos_token_ids", "read_json", "read_model_config", "read_model_type"]

_WITH_TEXT_PART = ("gemma3", "mistral3")
"""Models of text and images; the text part is served."""
TokenIds = int | list[int] | None


class _EosField(msgspec.Struct, frozen=True):
    eos_token_id: TokenIds = None


def read_model_type(directory: Path) -> str:
    """The family that a checkpoint belongs to, which decides what else must stand in its config.json.

    Raises SluiceError: NOT_FOUND without a config.json, INVALID where it names none.
    """
    path = directory / "config.json"
    model_type = _text_part(read_json(path)).get("model_type")
    if not isinstance(model_type, str):
        raise invalid("model_path", f"{path} has no model_type; it must name the model's architecture")
    return model_type


def read_model_config(directory: Path) -> ModelConfig:
    """Read a checkpoint's configuration.

    Raises SluiceError: NOT_FOUND without a config.json, INVALID where a field is missing or
    malformed, UNIMPLEMENTED for what the graph builder cannot express.
    """
    family = architecture(read_model_type(directory))
    path = directory / "config.json"
    file = ConfigFile(_text_part(read_json(path)), path)
    return replace(family.configure(file), eos_token_ids=read_eos_token_ids(directory, file))


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


def _text_part(fields: dict[str, Any]) -> dict[str, Any]:
    """The fields of the text model, which stand in a section where there is another model beside it."""
    text = fields.get("text_config")
    if fields.get("model_type") not in _WITH_TEXT_PART or not isinstance(text, dict):
        return fields
    shared = {name: fields.get(name) for name in ("eos_token_id", "quantization_config")}
    return {**shared, **text, "tie_word_embeddings": fields.get("tie_word_embeddings", True)}


def read_json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SluiceError(ErrorCode.NOT_FOUND, f"{path} does not exist", param="model_path") from error
    except msgspec.DecodeError as error:
        raise invalid("model_path", f"{path} is not a JSON object: {error}") from error
