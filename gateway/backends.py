"""Builds the repository: its backends, and the services of one server that its models share."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.option import as_option_error
from sluice.gateway.options.rag import RagOptions
from sluice.gateway.options.serving import OFF, InstanceOptions
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.pipelines.encoding.llm_encoder import find_encoder
from sluice.pipelines.llm.backend import LlmBackend
from sluice.pipelines.llm.services import LlmServices
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.retriever import RetrieverBackend
from sluice.pipelines.rag.stores.opening import open_store
from sluice.pipelines.remote.backend import OpenAIBackend
from sluice.pipelines.stages.backend import replace_python_stage
from sluice.pipelines.text.model import text_model_of
from sluice.serving.backend import BackendContext, CustomMetrics, ModelLookup
from sluice.serving.backends.python.backend import find_python_based
from sluice.serving.backends.registry import BackendRegistry
from sluice.serving.batching.rate_limiter import RateLimiter, parse_resources
from sluice.serving.caching.response_cache import ResponseCache
from sluice.serving.instance import HostPolicy, parse_host_policies
from sluice.serving.latencies import LatencyOptions
from sluice.serving.repository.loader import LoadHooks
from sluice.serving.repository.repository import ModelRepository, RoutedModels

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SharedResources:
    """Services of one server that its models share."""

    metrics: GatewayMetrics
    latencies: LatencyOptions = field(default_factory=LatencyOptions)
    custom_metrics: CustomMetrics | None = None
    response_cache: ResponseCache | None = None
    rate_limiter: RateLimiter | None = None
    host_policies: dict[str, HostPolicy] = field(default_factory=dict)
    library: DocumentLibrary | None = None
    choose_socket: Callable[[], Path | None] = lambda: None
    starts_engines: bool = True


def make_library(options: RagOptions, models: Callable[[], ModelLookup]) -> DocumentLibrary:
    """Build the library. Its store opens at first use, and `models` is called when a text is encoded.

    Raises OptionError.
    """
    with as_option_error():
        store = open_store(options.store_place())
    return DocumentLibrary(store, lambda name: find_encoder(models(), name), options.library_settings())


def make_rate_limiter(options: InstanceOptions) -> RateLimiter | None:
    """Build the rate limiter; None where the rate is not limited. Raises OptionError."""
    with as_option_error():
        resources = parse_resources(options.resources)
    return None if options.rate_limit == OFF else RateLimiter(resources)


def make_host_policies(options: InstanceOptions) -> dict[str, HostPolicy]:
    """Return the host policies by name. Raises OptionError."""
    with as_option_error():
        return parse_host_policies(options.host_policies)


def make_repository(config: ServeConfig, shared: SharedResources) -> ModelRepository:
    """Build the repository of the folders and stores in `config`; there are none where only MODEL is served."""
    options = config.repository

    def context(models: RoutedModels) -> BackendContext:
        return BackendContext(
            models=models,
            backend_options=options.by_backend(),
            control=models,
            custom_metrics=shared.custom_metrics,
            rate_limiter=shared.rate_limiter,
            response_cache=shared.response_cache,
            host_policies=shared.host_policies,
            latencies=shared.latencies,
        )

    registry = make_registry(config, shared)
    for name in sorted(options.by_backend().keys() - {"", *registry.names}):
        log.warning("--backend-config=%s,... has no effect: backends are %s", name, ", ".join(registry.names))
    return ModelRepository(
        options.paths,
        options.control_mode,
        context,
        poll_s=options.poll_s,
        strict_config=options.is_strict_config,
        registry=registry,
        settings=options.repository_settings(),
        hooks=LoadHooks(
            substitute=replace_python_stage if options.has_native_text_stages else lambda config: config,
            check=text_model_of,
        ),
    )


def make_registry(config: ServeConfig, shared: SharedResources) -> BackendRegistry:
    """Build the registry of installed backends. Those that need services of the server are made here."""
    services = LlmServices(
        config.engine,
        shared.metrics.open_request,
        config.shutdown.heartbeat_timeout_s,
        config.request_limits(),
        config.chat_settings(),
        config.fleet.routing(),
        shared.starts_engines,
        shared.choose_socket,
    )
    registry = BackendRegistry()
    registry.register(LlmBackend(services), "llm", "tensorrtllm", "vllm")
    registry.register(OpenAIBackend(services))
    registry.register(RetrieverBackend(shared.library))
    directory = config.repository.backend_directory
    for name in registry.register_missing(find_python_based(Path(directory))) if directory is not None else ():
        log.warning("--backend-directory: %s/model.py is not used, as Sluice has a backend of that name", name)
    return registry
