"""Which weights are compressed, and where: in the checkpoint, or while an engine is compiled of it."""

from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes
from engine.delegated.tensorrt_llm.folder import ModelFolder
from engine.delegated.tensorrt_llm.library import Library
from engine.model_folder import ModelFormat
from sluice.errors import invalid

_NONE = "none"
_OURS = {"int8": "W8A16", "int4": "W4A16"}
"""Our words, and TensorRT-LLM's names for the same; all else is one of its names, in small letters or large."""


def algorithm(word: str) -> str:
    """The name in QuantAlgo of what `quantization` says."""
    return _OURS.get(word.lower(), word.upper())


def resolve(
    wishes: Wishes, wanted: str, folder: ModelFolder, library: Library, *, is_engine: bool
) -> tuple[str, list[str]]:
    """How the weights are compressed, as `EngineInfo.quantization` says it, and notes.

    Raises SluiceError INVALID where the checkpoint is not so and TensorRT-LLM would not make it so.
    """
    word = wanted.lower()
    if word == _NONE:
        return wishes.get("quant_config.quant_algo", folder.quantization).lower(), []
    if folder.quantization in (word, algorithm(word).lower()):
        return folder.quantization, [f"quantization {word} is what the checkpoint holds already"]
    can_make = is_engine and folder.format is ModelFormat.HUGGINGFACE
    if not can_make or "quant_config" not in library.arguments(is_engine=is_engine):
        raise invalid("quantization", _refusal(word, folder))
    wishes.add("quant_config.quant_algo", algorithm(word), "quantization", Strength.ASKED)
    return algorithm(word).lower(), []


def _refusal(word: str, folder: ModelFolder) -> str:
    holds = "is not quantised" if folder.quantization == _NONE else f"holds {folder.quantization}"
    return (
        f"quantization {word} cannot be had from {folder.path}, which {holds}: TensorRT-LLM runs weights as they are "
        f"there. Make a quantised one with `sluice build --quantization {word}`, or leave quantization none"
    )
