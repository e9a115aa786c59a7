"""NVIDIA's text stages around a token model, as backends of our own: preprocessing, postprocessing and BLS."""

import asyncio

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.stages.bls import BlsModel
from pipelines.stages.fields import BLS, POSTPROCESSING, PREPROCESSING
from pipelines.stages.postprocessing import PostprocessingModel
from pipelines.stages.preprocessing import PreprocessingModel
from pipelines.stages.settings import bls_settings, tokenizer_settings
from pipelines.text.tokenizer import Tokenizer
from serving.backend import Backend, BackendContext
from serving.model import Model
from serving.spec import ModelSource


class PreprocessingBackend(Backend):
    """Text to token ids, with the tensors of NVIDIA's `preprocessing` model.

    Parameters: `tokenizer_dir`, relative to the model's folder; `add_special_tokens` (true).
    """

    name = "preprocessing"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return PREPROCESSING.completed(source.config)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        settings = tokenizer_settings(source, "add_special_tokens")
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
        settings = tokenizer_settings(source, "skip_special_tokens")
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
        return BlsModel(BLS.completed(source.config), source.version, context.models, bls_settings(source.config))
