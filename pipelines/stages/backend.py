"""Backends of NVIDIA's text stages around a token model: preprocessing, postprocessing and BLS.

With `--native-text-stages` they also serve NVIDIA's own models of these stages, in place of their `model.py`.
"""

import asyncio
import logging
from copy import deepcopy
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import SluiceError, invalid
from sluice.pipelines.llm.parameters import parameter_texts
from sluice.pipelines.stages.bls import BlsModel, BlsSettings
from sluice.pipelines.stages.stage import (
    BLS,
    POSTPROCESSING,
    PREPROCESSING,
    PostprocessingModel,
    PreprocessingModel,
    StageSignature,
)
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.config.validation import complete_and_check
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource

log = logging.getLogger(__name__)

MULTIMODAL = ("multimodal_model_path", "multimodal_encoders_name")
DRAFT = "tensorrt_llm_draft_model_name"
"""Parameters for features of NVIDIA's own stages only. Our backends refuse to load a model that sets one."""

_BOOLS = dict.fromkeys(("true", "1", "t", "y", "yes"), True)
_BOOLS |= dict.fromkeys(("false", "0", "f", "n", "no"), False)
_IGNORED = frozenset({"tokenizer_type", "gpt_model_path", "hf_model_path", "max_num_images", *MULTIMODAL, DRAFT})
_PYTHON = "python"


class PreprocessingBackend(Backend):
    """Serves text to token ids, with the tensors of NVIDIA's `preprocessing` model.

    Parameters: `tokenizer_dir`, relative to the model's folder; `add_special_tokens` (true).
    """

    name = "preprocessing"
    is_stateless = True

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return PREPROCESSING.complete(source.config)

    def check(self, source: ModelSource) -> None:
        complete_and_check(PREPROCESSING.complete(source.config))
        _read_tokenizer(source, "add_special_tokens")

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        tokenizer, adds_special = await asyncio.to_thread(_read_tokenizer, source, "add_special_tokens")
        config = PREPROCESSING.complete(source.config)
        return PreprocessingModel(config, source.version, tokenizer, adds_special=adds_special)


class PostprocessingBackend(Backend):
    """Serves token ids to text, with the tensors of NVIDIA's `postprocessing` model.

    Parameters: `tokenizer_dir`, relative to the model's folder; `skip_special_tokens` (true).
    """

    name = "postprocessing"
    is_stateless = True

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return POSTPROCESSING.complete(source.config)

    def check(self, source: ModelSource) -> None:
        complete_and_check(POSTPROCESSING.complete(source.config))
        _read_tokenizer(source, "skip_special_tokens")

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        tokenizer, skips_special = await asyncio.to_thread(_read_tokenizer, source, "skip_special_tokens")
        config = POSTPROCESSING.complete(source.config)
        return PostprocessingModel(config, source.version, tokenizer, skips_special=skips_special)


class BlsBackend(Backend):
    """Serves text to text over three other models, with the tensors of NVIDIA's `tensorrt_llm_bls` model.

    Parameters: `tensorrt_llm_model_name` (tensorrt_llm), `preprocessing_model_name` (preprocessing),
    `postprocessing_model_name` (postprocessing); `accumulate_tokens` (false): whether each response of a stream has
    the whole text so far.
    """

    name = "tensorrt_llm_bls"
    is_stateless = True
    finds_models = True

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        """Complete the tensors. A model that declares nothing is decoupled, unless it says otherwise."""
        config = BLS.complete(source.config)
        if not source.config.input and not source.config.HasField("model_transaction_policy"):
            config.model_transaction_policy.decoupled = True
        return config

    def check(self, source: ModelSource) -> None:
        complete_and_check(BLS.complete(source.config))
        read_bls_settings(source.config)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load the model. The models that it calls are looked up by each request: they may load later, and again."""
        return BlsModel(BLS.complete(source.config), source.version, context.models, read_bls_settings(source.config))


def _read_tokenizer(source: ModelSource, special_key: str) -> tuple[Tokenizer, bool]:
    """Read a stage's tokenizer, on a thread. Returns also the value of the parameter `special_key`, true where it is
    not set. Raises SluiceError INVALID, naming the parameter, UNAVAILABLE without a tokenizer."""
    texts = _read_parameters(source.config, {"tokenizer_dir", special_key})
    if "tokenizer_dir" not in texts:
        message = f"model '{source.name}' needs the parameter 'tokenizer_dir': the folder of its tokenizer"
        raise invalid("tokenizer_dir", message)
    handles_special = _parse_bool(source.name, texts, special_key, True)
    return Tokenizer.load(source.folder / texts["tokenizer_dir"]), handles_special


def read_bls_settings(config: ModelConfig) -> BlsSettings:
    """Read the settings of BLS. Raises SluiceError INVALID, naming the parameter."""
    names = ("tensorrt_llm_model_name", "preprocessing_model_name", "postprocessing_model_name")
    texts = _read_parameters(config, {*names, "accumulate_tokens"})
    return BlsSettings(
        token_model=texts.get(names[0], "tensorrt_llm"),
        preprocessing=texts.get(names[1], "preprocessing"),
        postprocessing=texts.get(names[2], "postprocessing"),
        accumulates=_parse_bool(config.name, texts, "accumulate_tokens", False),
    )


def _read_parameters(config: ModelConfig, known: set[str]) -> dict[str, str]:
    """Return the parameters that are set, and log those that are not `known`."""
    key = find_nvidia_parameter(config)
    if key is not None:
        message = f"parameter '{key}' of model '{config.name}' is not supported by backend '{config.backend}'"
        raise invalid(key, f"{message}, which serves text alone and no drafts; leave it out")
    texts = parameter_texts(config)
    unknown = sorted(texts.keys() - known - _IGNORED)
    if unknown:
        log.info("model '%s': without effect as written: %s", config.name, ", ".join(unknown))
    return texts


def _parse_bool(model: str, texts: dict[str, str], key: str, default: bool) -> bool:
    text = texts.get(key)
    if text is None:
        return default
    if text.lower() not in _BOOLS:
        raise invalid(key, f"parameter '{key}' of model '{model}' must be true or false, got '{text}'")
    return _BOOLS[text.lower()]


@dataclass(frozen=True, slots=True)
class _NvidiaStage:
    """A Python stage of NVIDIA's, recognized by its tensors and a parameter."""

    backend: str
    signature: StageSignature
    parameter: str
    """A parameter of NVIDIA's configuration that other models with such tensors do not have."""
    output: str

    def matches(self, config: ModelConfig) -> bool:
        if self.parameter not in config.parameters or not config.input:
            return False
        if self.output not in (each.name for each in config.output):
            return False
        try:
            self.signature.complete(config)
        except SluiceError:
            return False
        return True


_NVIDIA_STAGES = (
    _NvidiaStage("preprocessing", PREPROCESSING, "tokenizer_dir", "INPUT_ID"),
    _NvidiaStage("postprocessing", POSTPROCESSING, "tokenizer_dir", "OUTPUT"),
    _NvidiaStage("tensorrt_llm_bls", BLS, "accumulate_tokens", "text_output"),
)


def replace_python_stage(config: ModelConfig) -> ModelConfig:
    """Return `config` with the native backend where it is one of NVIDIA's Python stages, else unchanged."""
    stage = next((each for each in _NVIDIA_STAGES if config.backend == _PYTHON and each.matches(config)), None)
    if stage is None:
        return config
    parameter = find_nvidia_parameter(config)
    if parameter is not None:
        log.warning("model '%s' stays in Python: its parameter %s needs NVIDIA's own stage", config.name, parameter)
        return config
    native = deepcopy(config)
    native.backend, native.default_model_filename = stage.backend, ""
    for tensor in native.input:
        # NVIDIA's oldest postprocessing requires log probabilities, which its token model always gave.
        tensor.optional = tensor.optional or tensor.name in stage.signature.other_inputs
    log.info("model '%s': served by the native text stage '%s' in place of its model.py", config.name, stage.backend)
    return native


def find_nvidia_parameter(config: ModelConfig) -> str | None:
    """Return a set parameter for a feature of NVIDIA's own stages only, or None."""
    texts = parameter_texts(config)
    return next((key for key in (*MULTIMODAL, DRAFT) if key in texts), None)
