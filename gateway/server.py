"""The parts of a server below its ports: the data plane, and the rooms around it."""

import logging
from dataclasses import dataclass

from prometheus_client import CollectorRegistry

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.log_settings import LogSettings
from sluice.gateway.api.v2.server import V2Server
from sluice.gateway.api.v2.shared_memory import SharedMemoryRegistry
from sluice.gateway.api.v2.trace_settings import make_trace_settings
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.options.option import OptionError
from sluice.gateway.options.serving import RepositoryOptions
from sluice.gateway.options.telemetry import LoggingOptions
from sluice.gateway.plane.adapters import RuntimeAdapters
from sluice.gateway.plane.data_plane import Plane
from sluice.gateway.plane.health import ServerHealth
from sluice.gateway.plane.live_requests import LiveRequests
from sluice.gateway.plane.profiler import Profiler
from sluice.gateway.plane.rooms import OtherProcesses, Rooms
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.telemetry.tracer import make_tracer
from sluice.gateway.tenancy.accounts import Accounts
from sluice.pipelines.answers.cache import AnswerCache
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.routes.settings import ROUTES_FLAG, RouteSettings, read_routes
from sluice.record.timelines import Timelines
from sluice.serving.repository.managed_model import ModelState
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.repository.settings import ControlMode

log = logging.getLogger(__name__)

_INSTALL = "pip install 'sluice[otel]'"


@dataclass(frozen=True, slots=True)
class Server:
    """The parts of one server, each made once. The makers of routes and ports take those that they use."""

    plane: Plane
    v2: V2Server
    rooms: Rooms
    metrics: GatewayMetrics
    accounts: Accounts
    live: LiveRequests
    timelines: Timelines
    profiler: Profiler
    library: DocumentLibrary | None
    """None: no collections of documents."""
    elsewhere: OtherProcesses | None
    """None: the server has one process."""

    async def gather(self) -> CollectorRegistry:
        """Return the metrics of all processes of the server."""
        own = self.metrics.registry
        return own if self.elsewhere is None else await self.elsewhere.gather(own)

    async def abort_all(self, error: SluiceError) -> None:
        """End every open request with `error`, except those that other gateways go on with."""
        await self.rooms.leave()
        await self.plane.abort_all(error)


def build_server(
    config: ServeConfig,
    repository: ModelRepository,
    metrics: GatewayMetrics,
    rooms: Rooms,
    accounts: Accounts | None = None,
    *,
    answers: AnswerCache | None = None,
    library: DocumentLibrary | None = None,
    elsewhere: OtherProcesses | None = None,
) -> Server:
    """Build the data plane over `repository`, and the parts around it. They close with the rooms; the repository is to
    join these before the accounts, which note how its last requests end. Raises OptionError.

    `accounts` None: nobody is asked for a key, and no use is counted. `answers` keeps those of routes and keys that
    want it.
    """
    accounts = accounts or Accounts()
    is_strictly_ready = config.repository.is_strictly_ready
    health = ServerHealth(repository, config.shutdown.heartbeat_timeout_s, is_strictly_ready=is_strictly_ready)
    plane = Plane(repository, health, make_routes(config), answers)
    trace = make_trace_settings(config.trace)
    tracer = make_tracer(config.tracing)
    v2 = V2Server(
        models=plane.models,
        repository=repository,
        health=health,
        calls=accounts.calls,
        tracer=tracer,
        trace=trace,
        log_settings=make_log_settings(config.logging),
        shared_memory=SharedMemoryRegistry(config.http.allows_client_shm),
        adapters=RuntimeAdapters(repository, is_allowed=config.requests.allows_lora_updates),
        name=config.http.server_id,
        takes_model_files=config.repository.takes_model_files,
        elsewhere=elsewhere,
    )
    rooms.join(close=v2.close)
    rooms.join(tracer, close=tracer.close)
    return Server(
        plane=plane,
        v2=v2,
        rooms=rooms,
        metrics=metrics,
        accounts=accounts,
        live=LiveRequests(repository, elsewhere),
        timelines=Timelines(tracer.timelines, None if elsewhere is None else elsewhere.find_timelines),
        profiler=Profiler(repository, tracer.timelines),
        library=library,
        elsewhere=elsewhere,
    )


def make_routes(config: ServeConfig) -> dict[str, RouteSettings]:
    """Read the routes by name. Raises OptionError."""
    path = config.routes.file
    try:
        routes = {} if path is None else read_routes(path)
    except ValueError as error:
        raise OptionError(str(error)) from None
    if config.response_cache.parsed() is None:
        for name in (name for name, route in routes.items() if route.cache):
            message = f"route {name!r}: cache needs a response cache: --cache-config local,size=256000000, or redis"
            raise OptionError(f"{ROUTES_FLAG} {path}: {message}")
    return routes


def make_log_settings(options: LoggingOptions) -> LogSettings:
    """Build the log settings that apply until clients change them."""
    settings = LogSettings(file=options.file)
    if changes := options.settings():
        settings.update(changes)
    return settings


def check_start(plane: Plane, options: RepositoryOptions) -> None:
    """Warn of what is most likely a mistake, once all is loaded. Raises UNAVAILABLE for a model of the repository that
    failed to load, with --exit-on-error, and INVALID for routes that can never answer."""
    index = plane.repository.index()
    failed = [entry for entry in index if entry.state is ModelState.UNAVAILABLE]
    if failed and options.exits_on_error:
        reasons = "; ".join(f"{entry.name} version {entry.version}: {entry.reason}" for entry in failed)
        raise SluiceError(ErrorCode.UNAVAILABLE, f"not everything could be loaded (--exit-on-error): {reasons}")
    try:
        plane.routes.check({entry.name for entry in index})
    except SluiceError as error:
        if options.control_mode is ControlMode.NONE:
            raise
        log.warning("%s", error.message)  # models come and go
    if options.paths and options.control_mode is ControlMode.NONE and not index:
        log.warning("there is no model in %s; without --model-control-mode none can come", ", ".join(options.paths))
