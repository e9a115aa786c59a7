"""NVIDIA's text stages around a token model, as backends of our own: preprocessing, postprocessing and BLS."""

from pipelines.backends.base import Backend, BackendContext, ModelSource
from pipelines.inference.model import Model


class PreprocessingBackend(Backend):
    """Text to token ids, with the tensors of NVIDIA's `preprocessing` model."""

    name = "preprocessing"

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        raise NotImplementedError


class PostprocessingBackend(Backend):
    """Token ids to text, with the tensors of NVIDIA's `postprocessing` model."""

    name = "postprocessing"

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        raise NotImplementedError


class BlsBackend(Backend):
    """Preprocessing, token model and postprocessing in one, with the tensors of NVIDIA's `tensorrt_llm_bls` model."""

    name = "tensorrt_llm_bls"

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        raise NotImplementedError
