"""The backend `openai`: a model that lives behind an OpenAI-compatible API, as a model of the repository."""

import logging

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.llm.services import LlmServices, RequestLimits
from pipelines.remote import embedding, fields
from pipelines.remote.model import RemoteLlmModel
from pipelines.remote.options import Endpoint, options_of
from pipelines.remote.remote import Remote, import_openai, open_remote
from serving.backend import Backend, BackendContext
from serving.batching.scheduled_model import ScheduledModel
from serving.model import Model
from serving.spec import ModelSource, build_spec
from sluice.errors import invalid

log = logging.getLogger(__name__)


class OpenAIBackend(Backend):
    """Has no file: config.pbtxt says where the API is, and a numbered folder that there is a version."""

    name = "openai"

    def __init__(self, services: LlmServices | None = None) -> None:
        """Without `services`, nothing is measured and requests have no time limits but their models'."""
        self._services = services or LlmServices()

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
                return EncoderModel(source, context, remote, self._services.limits)
            return _llm(source, self._services, remote)
        except BaseException:
            await remote.close()
            raise


def _llm(source: ModelSource, services: LlmServices, remote: Remote) -> RemoteLlmModel:
    if source.config.HasField("dynamic_batching"):
        log.info("model '%s': without effect: dynamic_batching (the API batches its requests itself)", source.name)
    return RemoteLlmModel(source.config, source.version, remote, services.open_record, services.limits)


class EncoderModel(ScheduledModel):
    """Instances that share one API."""

    def __init__(self, source: ModelSource, context: BackendContext, remote: Remote, limits: RequestLimits) -> None:
        """Owns `remote`. Raises SluiceError INVALID for tensors that no encoder has."""
        embedding.check_tensors(build_spec(source.config, source.version))
        instances = [
            embedding.EmbeddingInstance(source.config, source.version, index, remote, limits)
            for index in range(remote.options.concurrency)
        ]
        super().__init__(source, instances, context=context)
        self._remote = remote

    async def close(self) -> None:
        await super().close()
        await self._remote.close()
