"""One file for each model family: how it reads its `config.json`, and how its decoder's graph is made."""

from engine.runners.openvino.architectures import (
    arcee,
    ernie4_5,
    exaone4,
    gemma,
    gemma2,
    gemma3,
    granite,
    llama,
    mistral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)
from engine.runners.openvino.architectures.family import Family
from sluice.errors import ErrorCode, SluiceError

ARCHITECTURES: dict[str, Family] = {
    "arcee": arcee.FAMILY,
    "ernie4_5": ernie4_5.ERNIE4_5,
    "exaone4": exaone4.FAMILY,
    "gemma": gemma.FAMILY,
    "gemma2": gemma2.FAMILY,
    "gemma3_text": gemma3.FAMILY,
    "granite": granite.FAMILY,
    "helium": ernie4_5.HELIUM,
    "llama": llama.FAMILY,
    "ministral": mistral.MINISTRAL,
    "ministral3": mistral.MINISTRAL3,
    "mistral": mistral.MISTRAL,
    "olmo2": olmo.OLMO2,
    "olmo3": olmo.OLMO3,
    "phi3": phi3.FAMILY,
    "qwen2": qwen2.FAMILY,
    "qwen3": qwen3.FAMILY,
    "seed_oss": seed_oss.FAMILY,
    "smollm3": smollm3.FAMILY,
    "stablelm": stablelm.FAMILY,
    "starcoder2": starcoder2.FAMILY,
}


def architecture(model_type: str) -> Family:
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
