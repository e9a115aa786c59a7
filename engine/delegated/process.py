"""The process of an engine whose runtime batches by itself: load, report, serve on an event loop, shut down."""

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable
from importlib import import_module

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.executor import DelegatedExecutor
from sluice.engine.delegated.interface import DelegatedRuntime, EngineLost
from sluice.engine.frames import LoadFailed, Ready, StepFrame
from sluice.engine.process.bootstrap import bootstrap, freeze_heap
from sluice.engine.process.kv_events import KvEventPublisher
from sluice.engine.process.transport import Transport
from sluice.errors import ErrorCode, SluiceError
from sluice.log_relay import relay_own_logs

log = logging.getLogger(__name__)

SHUTDOWN_S = 3.5
"""How long the runtime may take to end; the gateway waits for a little longer."""
EXIT_S = 1.0
"""After that: how long what is left of the runtime, threads and handlers at exit, may keep this process from ending."""

Load = Callable[[EngineConfig], DelegatedRuntime]
"""Loads a runtime. Blocks for as long as it takes, minutes for large models; no event loop is running, since a runtime
may start loops and processes of its own. What needs the loop belongs in `DelegatedRuntime.start`."""


def run(argv: list[str], load: Load) -> int:
    """Serve with the arguments of `sluice.engine.process` until told to stop or the runtime is lost; return the exit
    code."""
    with bootstrap(argv) as (config, transport):
        started = time.perf_counter()
        try:
            transport.listen(config.listening)
            runtime = load(config)
            relay_own_logs()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                return runner.run(_serve(runtime, config, transport, started))
        except SluiceError as error:
            transport.send_all(LoadFailed(error.code, error.message))
        except Exception as error:
            log.exception("loading %s failed", config.model_path)
            transport.send_all(LoadFailed(ErrorCode.INTERNAL, f"loading {config.model_path} failed: {error}"))
        return 1


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    """Return what makes the event loop: uvloop, a third faster, where the runtime's environment has it."""
    try:
        return import_module("uvloop").new_event_loop  # type: ignore[no-any-return]
    except ImportError:
        return asyncio.new_event_loop


async def _serve(runtime: DelegatedRuntime, config: EngineConfig, transport: Transport, started: float) -> int:
    """Start the runtime and serve; return the exit code. Raises only before the engine is ready."""
    info, iteration = await runtime.start()
    info = msgspec.structs.replace(info, load_seconds=time.perf_counter() - started, gives_views=True)
    events = None
    if runtime.prefixes is not None:
        transport.offer_prefixes(runtime.prefixes)
        if config.kv_events_endpoint is not None:
            events = runtime.prefixes.observer = KvEventPublisher(config, info.block_size, info.adapters)
    link = CommandLink(transport, events)
    executor = DelegatedExecutor(runtime, info, config, link.emit, iteration=iteration)
    transport.offer_view(executor.view)
    freeze_heap()
    transport.send_all(Ready(info))
    link.start(executor)
    code = 1
    try:
        await executor.run()
        code = 0
    except EngineLost as error:
        log.critical("%s; this engine ends", error)
    except Exception:
        log.critical("the loop failed; this engine ends", exc_info=True)
    finally:
        link.stop()
        if events is not None:
            events.close()
    if code == 0:
        await _shut_down(runtime)
    # End this process, whatever still waits for what is lost. Its client kills what is left of its session.
    timer = threading.Timer(EXIT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    return code


class CommandLink:
    """The socket on the event loop: received commands go to the executor, the executor's frames are sent."""

    def __init__(self, transport: Transport, events: KvEventPublisher | None = None) -> None:
        """`events` are published behind each frame."""
        self._transport = transport
        self._events = events
        self._executor: DelegatedExecutor | None = None
        self._is_due = False

    def start(self, executor: DelegatedExecutor) -> None:
        self._executor = executor
        for descriptor in self._transport.filenos():
            asyncio.get_running_loop().add_reader(descriptor, self._receive)
        self._receive()

    def stop(self) -> None:
        for descriptor in self._transport.filenos():
            asyncio.get_running_loop().remove_reader(descriptor)
        self._executor = None

    def emit(self, frame: StepFrame) -> None:
        self._transport.emit(frame)
        if self._events is not None:
            self._events.publish()
        self._receive_soon()  # sending has taken the signal of what came meanwhile

    def _receive(self) -> None:
        self._is_due = False
        if self._executor is None:
            return
        if commands := self._transport.receive(0.0):
            self._executor.obey(commands)
        if self._transport.has_more:
            self._receive_soon()

    def _receive_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._receive)


async def _shut_down(runtime: DelegatedRuntime) -> None:
    """Shut the runtime down within bounds: a lost rank may never answer. The rest is killed with this session."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def shut_down() -> None:
        try:
            runtime.shutdown()
        except Exception as error:
            log.warning("shutting %s down failed: %s", runtime.title, error)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=shut_down, name="shutdown", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), SHUTDOWN_S)
    except TimeoutError:
        log.warning("%s did not end within %g s", runtime.title, SHUTDOWN_S)
