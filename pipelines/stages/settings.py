"""The parameters of the text stages' configurations: NVIDIA's names and spellings."""

import logging
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.llm.parameters import texts_of
from serving.spec import ModelSource
from sluice.errors import invalid

log = logging.getLogger(__name__)

MULTIMODAL = ("multimodal_model_path", "multimodal_encoders_name")
DRAFT = "tensorrt_llm_draft_model_name"
"""What only NVIDIA's own stages do: set, it is a load error."""

_WORDS = dict.fromkeys(("true", "1", "t", "y", "yes"), True)
_WORDS |= dict.fromkeys(("false", "0", "f", "n", "no"), False)
_WITHOUT_EFFECT = frozenset({"tokenizer_type", "gpt_model_path", "hf_model_path", "max_num_images", *MULTIMODAL, DRAFT})


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """`handles_special`: preprocessing adds special tokens to a prompt, postprocessing leaves them out of a text."""

    folder: Path
    handles_special: bool


@dataclass(frozen=True, slots=True)
class BlsSettings:
    """The models that are called. `accumulates`: each response of a stream has the whole text so far."""

    token_model: str
    preprocessing: str
    postprocessing: str
    accumulates: bool


def tokenizer_settings(source: ModelSource, special_key: str) -> TokenizerSettings:
    """`tokenizer_dir` is relative to the model's folder. Raises SluiceError INVALID, naming the parameter."""
    texts = _texts(source.config, {"tokenizer_dir", special_key})
    if "tokenizer_dir" not in texts:
        message = f"model '{source.name}' needs the parameter 'tokenizer_dir': the folder of its tokenizer"
        raise invalid("tokenizer_dir", message)
    return TokenizerSettings(source.folder / texts["tokenizer_dir"], _switch(source.name, texts, special_key, True))


def bls_settings(config: ModelConfig) -> BlsSettings:
    """Raises as `tokenizer_settings`."""
    names = ("tensorrt_llm_model_name", "preprocessing_model_name", "postprocessing_model_name")
    texts = _texts(config, {*names, "accumulate_tokens"})
    return BlsSettings(
        token_model=texts.get(names[0], "tensorrt_llm"),
        preprocessing=texts.get(names[1], "preprocessing"),
        postprocessing=texts.get(names[2], "postprocessing"),
        accumulates=_switch(config.name, texts, "accumulate_tokens", False),
    )


def only_nvidias(config: ModelConfig) -> str | None:
    """A parameter that is set and asks for what only NVIDIA's stages do; None where there is none."""
    texts = texts_of(config)
    return next((key for key in (*MULTIMODAL, DRAFT) if key in texts), None)


def _texts(config: ModelConfig, known: set[str]) -> dict[str, str]:
    """Those that are set; others than the `known` are told of."""
    key = only_nvidias(config)
    if key is not None:
        message = f"parameter '{key}' of model '{config.name}' is not supported by backend '{config.backend}'"
        raise invalid(key, f"{message}, which serves text alone and no drafts; leave it out")
    texts = texts_of(config)
    unknown = sorted(texts.keys() - known - _WITHOUT_EFFECT)
    if unknown:
        log.info("model '%s': without effect as written: %s", config.name, ", ".join(unknown))
    return texts


def _switch(model: str, texts: dict[str, str], key: str, default: bool) -> bool:
    text = texts.get(key)
    if text is None:
        return default
    if text.lower() not in _WORDS:
        raise invalid(key, f"parameter '{key}' of model '{model}' must be true or false, got '{text}'")
    return _WORDS[text.lower()]
