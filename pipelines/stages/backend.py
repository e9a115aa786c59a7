"""NVIDIA's text stages around a token model, as backends of our own: preprocessing, postprocessing and BLS."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.llm.parameters import parameter_texts
from pipelines.stages.bls import BlsModel, BlsSettings
from pipelines.stages.postprocessing import PostprocessingModel
from pipelines.stages.preprocessing import PreprocessingModel
from pipelines.stages.stage import BLS, POSTPROCESSING, PREPROCESSING, StageSignature
from pipelines.text.tokenizer import Tokenizer
from serving.backend import Backend, BackendContext
from serving.model import Model
from serving.spec import ModelSource
from sluice.errors import SluiceError, invalid

PYTHON = "python"


@dataclass(frozen=True, slots=True)
class _Known:
    backend: str
    stage: StageSignature
    parameter: str
    """One that NVIDIA's configuration has and no other model with such tensors would."""
    output: str

    def is_of(self, config: ModelConfig) -> bool:
        if self.parameter not in config.parameters or not config.input:
            return False
        if self.output not in (each.name for each in config.output):
            return False
        try:
            self.stage.completed(config)
        except SluiceError:
            return False
        return True


_KNOWN = (
    _Known("preprocessing", PREPROCESSING, "tokenizer_dir", "INPUT_ID"),
    _Known("postprocessing", POSTPROCESSING, "tokenizer_dir", "OUTPUT"),
    _Known("tensorrt_llm_bls", BLS, "accumulate_tokens", "text_output"),
)


def replace_python_stage(config: ModelConfig) -> ModelConfig:
    """`config` with the native backend, where it is one of NVIDIA's Python stages; else as it is."""
    known = next((each for each in _KNOWN if config.backend == PYTHON and each.is_of(config)), None)
    if known is None:
        return config
    parameter = find_nvidia_parameter(config)
    if parameter is not None:
        log.warning("model '%s' stays in Python: its parameter %s needs NVIDIA's own stage", config.name, parameter)
        return config
    native = ModelConfig()
    native.CopyFrom(config)
    native.backend, native.default_model_filename = known.backend, ""
    for tensor in native.input:
        # NVIDIA's oldest postprocessing wants log probabilities, which its token model gave asked for or not.
        tensor.optional = tensor.optional or tensor.name in known.stage.other_inputs
    log.info("model '%s': served by the native text stage '%s' in place of its model.py", config.name, known.backend)
    return native


class PreprocessingBackend(Backend):
    """Text to token ids, with the tensors of NVIDIA's `preprocessing` model.

    Parameters: `tokenizer_dir`, relative to the model's folder; `add_special_tokens` (true).
    """

    name = "preprocessing"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return PREPROCESSING.completed(source.config)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        settings = read_tokenizer_settings(source, "add_special_tokens")
        tokenizer = await asyncio.to_thread(Tokenizer.load, settings.folder)
        return PreprocessingModel(
            PREPROCESSING.completed(source.config), source.version, tokenizer, adds_special=settings.handles_special
        )


class PostprocessingBackend(Backend):
    """Token ids to text, with the tensors of NVIDIA's `postprocessing` model.

    Parameters: `tokenizer_dir`, relative to the model's folder; `skip_special_tokens` (true).
    """

    name = "postprocessing"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return POSTPROCESSING.completed(source.config)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        settings = read_tokenizer_settings(source, "skip_special_tokens")
        tokenizer = await asyncio.to_thread(Tokenizer.load, settings.folder)
        return PostprocessingModel(
            POSTPROCESSING.completed(source.config), source.version, tokenizer, skips_special=settings.handles_special
        )


class BlsBackend(Backend):
    """Preprocessing, token model and postprocessing in one, with the tensors of NVIDIA's `tensorrt_llm_bls` model.

    Parameters: `tensorrt_llm_model_name` (tensorrt_llm), `preprocessing_model_name` (preprocessing),
    `postprocessing_model_name` (postprocessing); `accumulate_tokens` (false): whether each response of a stream has
    the whole text so far.
    """

    name = "tensorrt_llm_bls"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        """Decoupled where it declares nothing and does not say."""
        config = BLS.completed(source.config)
        if not source.config.input and not source.config.HasField("model_transaction_policy"):
            config.model_transaction_policy.decoupled = True
        return config

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """The models that it calls are looked for with each request: they may load later, and anew."""
        return BlsModel(BLS.completed(source.config), source.version, context.models, read_bls_settings(source.config))


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


def read_tokenizer_settings(source: ModelSource, special_key: str) -> TokenizerSettings:
    """`tokenizer_dir` is relative to the model's folder. Raises SluiceError INVALID, naming the parameter."""
    texts = _texts(source.config, {"tokenizer_dir", special_key})
    if "tokenizer_dir" not in texts:
        message = f"model '{source.name}' needs the parameter 'tokenizer_dir': the folder of its tokenizer"
        raise invalid("tokenizer_dir", message)
    return TokenizerSettings(source.folder / texts["tokenizer_dir"], _switch(source.name, texts, special_key, True))


def read_bls_settings(config: ModelConfig) -> BlsSettings:
    """Raises as `read_tokenizer_settings`."""
    names = ("tensorrt_llm_model_name", "preprocessing_model_name", "postprocessing_model_name")
    texts = _texts(config, {*names, "accumulate_tokens"})
    return BlsSettings(
        token_model=texts.get(names[0], "tensorrt_llm"),
        preprocessing=texts.get(names[1], "preprocessing"),
        postprocessing=texts.get(names[2], "postprocessing"),
        accumulates=_switch(config.name, texts, "accumulate_tokens", False),
    )


def find_nvidia_parameter(config: ModelConfig) -> str | None:
    """A parameter that is set and asks for what only NVIDIA's stages do; None where there is none."""
    texts = parameter_texts(config)
    return next((key for key in (*MULTIMODAL, DRAFT) if key in texts), None)


def _texts(config: ModelConfig, known: set[str]) -> dict[str, str]:
    """Those that are set; others than the `known` are told of."""
    key = find_nvidia_parameter(config)
    if key is not None:
        message = f"parameter '{key}' of model '{config.name}' is not supported by backend '{config.backend}'"
        raise invalid(key, f"{message}, which serves text alone and no drafts; leave it out")
    texts = parameter_texts(config)
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
