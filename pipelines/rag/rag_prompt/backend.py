"""The backend `rag_prompt`: from a question and what was retrieved to the messages of a language model."""

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.rag.rag_prompt.asked import settings_of
from pipelines.rag.rag_prompt.language_model import LanguageModel
from pipelines.rag.rag_prompt.model import (
    CACHE_SALT,
    CONTEXT,
    DROPPED,
    MESSAGES,
    QUERY,
    SAMPLING_CONFIG,
    SOURCES,
    RagPromptModel,
)
from serving.backend import Backend, BackendContext
from serving.config.completion import DeclaredTensor, complete_tensors
from serving.spec import ModelSource

INPUTS = (
    DeclaredTensor(QUERY, "BYTES"),
    DeclaredTensor(CONTEXT, "BYTES", (-1,)),
    DeclaredTensor(SOURCES, "BYTES", (-1,), is_optional=True),
)
OUTPUTS = (
    DeclaredTensor(MESSAGES, "BYTES"),
    DeclaredTensor(SOURCES, "BYTES", (-1,)),
    DeclaredTensor(DROPPED, "BYTES", (-1,)),
    DeclaredTensor(SAMPLING_CONFIG, "BYTES"),
    DeclaredTensor(CACHE_SALT, "BYTES"),
)


class RagPromptBackend(Backend):
    """Its models load before their language model does: that is looked for with each request."""

    name = "rag_prompt"

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return complete_tensors(source.config, INPUTS, OUTPUTS)

    async def load(self, source: ModelSource, context: BackendContext) -> RagPromptModel:
        settings = settings_of(source.config)
        llm = await LanguageModel.load(context.models, settings, source.folder)
        return RagPromptModel(source.config, source.version, settings, llm)
