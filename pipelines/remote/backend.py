"""The backend `openai`: models behind an OpenAI-compatible API as models of the repository."""

import logging

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid
from sluice.pipelines.llm.services import LlmServices
from sluice.pipelines.remote import embedding, fields
from sluice.pipelines.remote.client import ApiClient, import_openai, open_client, read_files
from sluice.pipelines.remote.embedding import EncoderModel
from sluice.pipelines.remote.model import RemoteLlmModel
from sluice.pipelines.remote.options import Endpoint, RemoteOptions, parse_options
from sluice.serving.backend import Backend, BackendContext
from sluice.serving.config.validation import complete_and_check
from sluice.serving.model import Model
from sluice.serving.spec import ModelSource, build_spec

log = logging.getLogger(__name__)


class OpenAIBackend(Backend):
    """Serves models without files: config.pbtxt says where the API is, and an empty version folder that it serves."""

    name = "openai"

    def __init__(self, services: LlmServices | None = None) -> None:
        """Take the server's services. Without them requests are not measured and only models set time limits."""
        self._services = services or LlmServices()

    def start_loading_early(self) -> None:
        import_openai("")

    async def complete(self, source: ModelSource, context: BackendContext) -> ModelConfig:
        return _complete(source.config)

    def check(self, source: ModelSource) -> None:
        """Check everything but the API itself."""
        config = complete_and_check(_complete(source.config))
        options, spec = _read_options(config), build_spec(config, source.version)
        read_files(source.name, options, source.folder)
        if options.endpoint is Endpoint.EMBEDDINGS:
            embedding.check_tensors(spec)
        else:
            fields.declared_inputs(spec, options)

    async def load(self, source: ModelSource, context: BackendContext) -> Model:
        """Load a model. Raises SluiceError INVALID for its configuration, UNAVAILABLE without the openai library.

        The API is first called by the first request, unless `check_on_load` is set.
        """
        options = _read_options(source.config)
        client = await open_client(source.name, options, source.folder)
        try:
            if options.endpoint is Endpoint.EMBEDDINGS:
                return EncoderModel(source, context, client, self._services.limits)
            return _llm(source, self._services, client)
        except BaseException:
            await client.close()
            raise


def _complete(config: ModelConfig) -> ModelConfig:
    options = parse_options(config)
    is_encoder = options.endpoint is Endpoint.EMBEDDINGS
    return (embedding if is_encoder else fields).complete_config(config, options)


def _read_options(config: ModelConfig) -> RemoteOptions:
    options = parse_options(config)
    if config.HasField("sequence_batching"):
        raise invalid("sequence_batching", f"model '{config.name}': an API keeps no state between requests")
    return options


def _llm(source: ModelSource, services: LlmServices, client: ApiClient) -> RemoteLlmModel:
    if source.config.HasField("dynamic_batching"):
        log.info("model '%s': without effect: dynamic_batching (the API batches its requests itself)", source.name)
    return RemoteLlmModel(source.config, source.version, client, services.open_record, services.limits)
