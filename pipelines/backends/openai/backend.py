"""The backend `openai`: a model that lives behind an OpenAI-compatible API, as a model of the repository."""

import logging

from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import invalid
from pipelines.backends.base import Backend, BackendContext, ModelSource
from pipelines.backends.openai import embedding, fields
from pipelines.backends.openai.model import RemoteLlmModel
from pipelines.backends.openai.options import Endpoint, RemoteOptions, options_of
from pipelines.backends.openai.remote import Remote, import_openai, open_remote
from pipelines.batching.scheduled import ScheduledModel
from pipelines.inference.model import Model
from pipelines.inference.spec import spec_of

log = logging.getLogger(__name__)


class OpenAIBackend(Backend):
    """Has no file: config.pbtxt says where the API is, and a numbered folder that there is a version."""

    name = "openai"

    def start_loading_early(self) -> None:
        import_openai("")

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        options = options_of(source.config)
        is_encoder = options.endpoint is Endpoint.EMBEDDINGS
        return (embedding if is_encoder else fields).completed(source.config, options)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Raises SluiceError INVALID for a configuration that cannot be followed, UNAVAILABLE without the library.

        Whether the API is there is seen at the first request, unless `check_on_load` asks for it now.
        """
        options = options_of(source.config)
        if source.config.HasField("sequence_batching"):
            raise invalid("sequence_batching", f"model '{source.name}': an API keeps no state between requests")
        remote = await open_remote(source.name, options, source.folder)
        try:
            if options.endpoint is Endpoint.EMBEDDINGS:
                return EncoderModel(source, context, remote)
            return _llm(source, context, remote, options)
        except BaseException:
            await remote.close()
            raise


def _llm(source: ModelSource, context: BackendContext, remote: Remote, options: RemoteOptions) -> RemoteLlmModel:
    if source.config.HasField("dynamic_batching"):
        log.info("model '%s': without effect: dynamic_batching (the API batches its requests itself)", source.name)
    return RemoteLlmModel(source.config, source.version, remote, context.open_record, context.request_limits)


class EncoderModel(ScheduledModel):
    """Instances that share one API."""

    def __init__(self, source: ModelSource, context: BackendContext, remote: Remote) -> None:
        """Owns `remote`. Raises SluiceError INVALID for tensors that no encoder has."""
        embedding.check_tensors(spec_of(source.config, source.version))
        instances = [
            embedding.EmbeddingInstance(source.config, source.version, index, remote, context.request_limits)
            for index in range(remote.options.concurrency)
        ]
        super().__init__(source, instances, context=context)
        self._remote = remote

    async def close(self) -> None:
        await super().close()
        await self._remote.close()
