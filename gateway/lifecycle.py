"""The life of the server's process: from its start to a ready server, and from a signal to a clean end."""

import asyncio
import gc
import logging
import os
import resource
import signal
import socket
import sys
import threading
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, NoReturn

import uvloop

from engine.client.process import ProcessEngineClient
from gateway.checkpoint import served_name
from gateway.listeners import ListenError, Listeners, is_loopback, listen, listener_url
from gateway.options.config import ServeConfig
from serving.repository.managed_model import ModelState
from serving.repository.settings import ControlMode
from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:  # imported for real while the engine loads
    from engine.client.base import EngineClient
    from gateway.batches.service import BatchService
    from gateway.grpc.server import GrpcServer
    from gateway.http.server import HttpServer
    from gateway.service import InferenceService

log = logging.getLogger(__name__)
_SWITCH_INTERVAL_S = 0.001
"""How long a thread may keep the interpreter's lock while others wait: the event loop waits so for each long work."""

FLUSH_TIMEOUT_S = 2.0
"""Seconds that the last bytes may take to reach a slow client after the last stream ended."""
GRPC_NOTICE_S = 0.25
"""Seconds between telling gRPC's clients that the server ends and closing their connections."""
SIGNAL_ECHO_S = 0.1
"""Seconds within which a second signal counts as the first: `timeout` and others signal a process and its group."""
HANG_TIMEOUT_S = 15.0
"""Seconds that the rest of a shutdown may take beyond open streams, before the process ends by force."""
MAX_NAMED_MODELS = 8
"""Most models that the ready line names."""
WATCH_INTERVAL_S = 1.0
"""Seconds between checks for a change in readiness."""


def run_server(config: ServeConfig, checkpoint: Path | None, started: float) -> None:
    """Serve until a signal. `started` is when the command began, by perf_counter.

    Raises ListenError for a port that is not available, SluiceError where the model cannot be served.
    """
    listeners = Listeners(
        listen(config.http.host, config.http.port, "--http-port", shares_port=config.http.shares_port),
        _listen_for_metrics(config),
    )
    if config.access.api_key is None and not is_loopback(listeners.http):
        log.warning("listening on %s without an API key: whoever reaches it may use it", config.http.host)
    _raise_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, checkpoint, listeners, started))


def _listen_for_metrics(config: ServeConfig) -> socket.socket | None:
    if not config.metrics.is_allowed:
        return None
    if config.metrics.host is None:
        return listen(config.http.host, config.metrics.port, "--metrics-port")
    return listen(config.metrics.host, config.metrics.port, "--metrics-port", host_flag="--metrics-address")


def _raise_file_limit() -> None:
    """Raise the limit of open files: each connection is one, and the usual limit of 1024 is a login shell's."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(config: ServeConfig, checkpoint: Path | None, listeners: Listeners, started: float) -> None:
    server = GatewayServer(config, checkpoint, listeners, started)
    server.handle_signals()
    await server.run()


class GatewayServer:
    """The servers of the ports, the repository behind them, and the engine of MODEL where one is named.

    It must be made on the event loop that runs it.
    """

    def __init__(self, config: ServeConfig, checkpoint: Path | None, listeners: Listeners, started: float) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._listeners = listeners
        self._started = started
        self._engine = None if checkpoint is None else make_engine(config, checkpoint)
        self._stopping = asyncio.Event()
        self._signalled = 0.0
        self._service: InferenceService | None = None
        self._batches: BatchService | None = None
        self._servers: list[HttpServer] = []
        self._grpc: GrpcServer | None = None
        self._grpc_address = ""

    def handle_signals(self) -> None:
        """Let SIGTERM and SIGINT shut the server down, and a second one end it at once."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)

    def _on_signal(self, number: signal.Signals) -> None:
        now = perf_counter()
        if not self._stopping.is_set():
            log.info("%s: shutting down; once more ends at once", number.name)
            self._stopping.set()
            self._signalled = now
            self._end_by_force_later(number)
            return
        if now - self._signalled < SIGNAL_ECHO_S:
            return
        log.warning("%s again: ending at once", number.name)
        self._end_by_force(number)

    def _end_by_force_later(self, number: signal.Signals) -> None:
        """Start a timer that ends the process: a thread that hangs in a library would otherwise keep it for ever."""
        limit_s = self._config.shutdown.exit_timeout_s + HANG_TIMEOUT_S

        def end() -> None:
            log.critical("not ended %g s after %s: ending by force", limit_s, number.name)
            self._end_by_force(number)

        timer = threading.Timer(limit_s, end)
        timer.daemon = True
        timer.start()

    def _end_by_force(self, number: signal.Signals) -> NoReturn:
        for engine in self._engines():
            if isinstance(engine, ProcessEngineClient):
                engine.kill()
        os._exit(128 + number)

    async def run(self) -> None:
        """Start, serve until a signal, shut down. Raises SluiceError where the model cannot be served."""
        serving = asyncio.create_task(self._start_and_watch(), name="serving")
        stopping = asyncio.create_task(self._stopping.wait(), name="stopping")
        try:
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
            await _cancel(serving)
            await self._drain()
        finally:
            await _cancel(serving, stopping)
            await self._close()

    async def _start_and_watch(self) -> None:
        """Load the engine, and everything else meanwhile; then watch the server's health until cancelled."""
        engine_start = asyncio.create_task(self._start_engine(), name="engine-start")
        try:
            await asyncio.to_thread(_import_heavy_modules)
            service = await self._open()
            gc.freeze()  # what is imported stays
            gc.enable()
            await self._load_all(service, engine_start)
        finally:
            await _cancel(engine_start)
        self._check_loaded(service)
        self._warn_if_empty(service)
        # The objects of the start stay: the garbage collector need not traverse them with every request's garbage.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        service.begin_serving()
        assert self._batches is not None
        self._batches.start()
        self._print_ready(service)
        reading = asyncio.create_task(self._read_documentation(service), name="documentation")
        try:
            await self._watch(service)
        finally:
            await _cancel(reading)

    async def _load_all(self, service: "InferenceService", engine_start: "asyncio.Task[None]") -> None:
        """Load the repository and MODEL at the same time. Models of the repository that call MODEL wait for it."""
        settled = None if self._checkpoint is None else service.repository.expect(self._model_name)
        loading = asyncio.create_task(service.repository.start(self._config.repository.load), name="repository")
        try:
            try:
                await self._load_model(service, engine_start)
            finally:
                if settled is not None:
                    settled()
            await loading
        finally:
            await _cancel(loading)

    async def _read_documentation(self, service: "InferenceService") -> None:
        """Read the documentation, from which the bundled pipeline answers. What an earlier server has read is kept."""
        from gateway.documentation import ingest_documentation

        if self._config.rag.is_served and service.library is not None:
            await ingest_documentation(service.library)

    async def _start_engine(self) -> None:
        if self._engine is not None:
            await self._engine.start()

    async def _load_model(self, service: "InferenceService", engine_start: "asyncio.Task[None]") -> None:
        """Load MODEL, which is in no repository."""
        from gateway.assembly import load_model

        if self._engine is not None and self._checkpoint is not None:
            await load_model(service, self._config, self._checkpoint, self._engine, engine_start)

    @property
    def _model_name(self) -> str:
        """Name of MODEL; "" where there is none."""
        if self._checkpoint is None:
            return ""
        return served_name(self._config.model.served_model_name, self._checkpoint)

    async def _open(self) -> "InferenceService":
        """Open the ports. Until the models are loaded, the probes report that the server is not ready."""
        from gateway.assembly import make_grpc_server, make_http_servers, make_service
        from gateway.batches.service import BatchService

        service = make_service(self._config)
        self._service = service
        self._batches = BatchService(service, self._config)
        self._servers = make_http_servers(service, self._batches, self._config, self._listeners)
        for server in self._servers:
            server.start()
        self._grpc = make_grpc_server(service, self._config)
        await self._listen_for_grpc()
        more = [f"metrics {self._metrics_url}"] if self._metrics_url else []
        more += [f"gRPC {self._grpc_address}"] if self._grpc_address else []
        _print_line(f"Listening on {listener_url(self._listeners.http)}" + (f" ({', '.join(more)})" if more else ""))
        return service

    @property
    def _metrics_url(self) -> str:
        """URL of the metrics page; "" without one."""
        listener = self._listeners.metrics
        return f"{listener_url(listener)}/metrics" if listener is not None else ""

    async def _listen_for_grpc(self) -> None:
        if self._grpc is None:
            return
        try:
            port = await self._grpc.start()
        except OSError as error:
            raise ListenError(f"{error}; choose another with --grpc-port (0 takes a free one)") from None
        self._grpc_address = f"{self._config.grpc.host or self._config.http.host}:{port}"

    def _check_loaded(self, service: "InferenceService") -> None:
        """Raise UNAVAILABLE for a model of the repository that failed to load, with --exit-on-error."""
        failed = [entry for entry in service.repository.index() if entry.state is ModelState.UNAVAILABLE]
        if failed and self._config.repository.exits_on_error:
            reasons = "; ".join(f"{entry.name} version {entry.version}: {entry.reason}" for entry in failed)
            raise SluiceError(ErrorCode.UNAVAILABLE, f"not everything could be loaded (--exit-on-error): {reasons}")

    def _warn_if_empty(self, service: "InferenceService") -> None:
        """Warn of a repository without models where clients can load none: its path is most likely wrong."""
        options = self._config.repository
        if options.paths and options.control_mode is ControlMode.NONE and not service.repository.index():
            log.warning("there is no model in %s; without --model-control-mode none can come", ", ".join(options.paths))

    def _print_ready(self, service: "InferenceService") -> None:
        http = listener_url(self._listeners.http)
        grpc = f" and gRPC {self._grpc_address}" if self._grpc_address else ""
        metrics = f" - metrics {self._metrics_url}" if self._metrics_url else ""
        _print_line(
            f"Sluice {version('sluice')} serving {describe_served(service)}"
            f" - OpenAI {http}/v1 - v2 {http}/v2{grpc}{metrics}"
            f" - ready in {perf_counter() - self._started:.1f} s"
        )

    async def _watch(self, service: "InferenceService") -> None:
        """Log changes of readiness. An engine that was given up stays so: requests get 503 until a restart."""
        was_ready, was_live = True, True
        tasks = [server.task for server in self._servers]
        while True:
            ended, _ = await asyncio.wait(tasks, timeout=WATCH_INTERVAL_S, return_when=asyncio.FIRST_COMPLETED)
            for task in ended:
                task.result()
                raise SluiceError(ErrorCode.INTERNAL, "an HTTP server ended unexpectedly")
            readiness, is_live = service.readiness(), service.is_live()
            if not readiness.is_ok and (was_ready or is_live != was_live):
                log.log(logging.WARNING if is_live else logging.CRITICAL, "not ready: %s", readiness.reason)
            elif readiness.is_ok and not was_ready:
                log.warning("ready again")
            was_ready, was_live = readiness.is_ok, is_live

    async def _drain(self) -> None:
        """Wait for open requests; those that take too long end with an error."""
        if self._service is None:
            return
        assert self._batches is not None
        await self._batches.stop()
        self._service.begin_drain()
        self._servers[0].begin_stop()
        timeout_s = self._config.shutdown.exit_timeout_s
        if self._grpc is not None:
            self._grpc.begin_stop()
            await asyncio.sleep(min(GRPC_NOTICE_S, timeout_s))
        if await self._service.wait_idle(timeout_s):
            return
        log.warning("%d requests are still open after %g s; ending them", self._service.num_open, timeout_s)
        await self._service.abort_all(SluiceError(ErrorCode.UNAVAILABLE, "the server is shutting down"))
        await self._service.wait_idle(FLUSH_TIMEOUT_S)

    async def _close(self) -> None:
        """Close everything, whatever the start has reached. The engines' processes have ended when this returns."""
        try:
            servers = (*self._servers, self._grpc)
            await asyncio.gather(*(server.stop(FLUSH_TIMEOUT_S) for server in servers if server is not None))
        finally:
            if self._batches is not None and self._service is not None:
                await self._batches.close()
                await self._service.close()
            if self._engine is not None:
                await self._engine.stop()
            for listener in self._listeners:
                if listener is not None:
                    listener.close()

    def _engines(self) -> "list[EngineClient]":
        """Return MODEL's engine, which exists from the start, and those of loaded models."""
        own: list[EngineClient] = [] if self._engine is None else [self._engine]
        return own + (self._service.engines() if self._service is not None else [])


async def _cancel(*tasks: asyncio.Task[object]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


def make_engine(config: ServeConfig, checkpoint: Path) -> ProcessEngineClient:
    """Make the engine of MODEL, which has not started."""
    heartbeat_timeout_s = config.shutdown.heartbeat_timeout_s
    return ProcessEngineClient(config.engine(str(checkpoint)), heartbeat_timeout_s=heartbeat_timeout_s)


def _import_heavy_modules() -> None:
    """Import heavy modules; to be called on a thread, so that the event loop goes on."""
    for name in ("gateway.assembly", "pipelines.llm.backend"):
        import_module(name)


def describe_served(service: "InferenceService") -> str:
    """Describe the one language model with its limits, or name the models; and count those that are missing."""
    from pipelines.llm.model import llm_text_of  # imported by now

    models = service.repository.models()
    names = sorted({model.name for model in models})
    missing = ""
    if count := sum(entry.state is ModelState.UNAVAILABLE for entry in service.repository.index()):
        missing = f", {count} not available (the log says why, `sluice repository check` what to write)"
    texts = [text for model in models if (text := llm_text_of(model)) is not None]
    if len(texts) == 1:
        text, info = texts[0], texts[0].info
        what = f"{info.model_type}, {info.dtype}, context {info.max_model_len} tokens"
        beside = f" and {len(names) - 1} models beside it" if len(names) > 1 else ""
        return f"{text.name} ({what}; KV cache {info.num_blocks * info.block_size} tokens){beside}{missing}"
    shown = ", ".join(names[:MAX_NAMED_MODELS]) + (", ..." if len(names) > MAX_NAMED_MODELS else "")
    return f"{len(names)} models ({shown}){missing}" if names else f"no models yet{missing}"


def _print_line(line: str) -> None:
    """Print a line for the operator. Scripts read the addresses from it. A full disk or a closed pipe stops nothing."""
    try:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except OSError as error:
        log.warning("standard output takes no lines (%s): %s", error, line)
        # What could not be written is still buffered, and the interpreter would fail to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
