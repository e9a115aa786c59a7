"""The engine process: `python -m sluice.engine.process ENDPOINT PARENT_PID LOG CONFIG_FILE`. Clients are DEALERs of its
ROUTER socket. The loop polls it between steps, so that no second thread competes for Python's lock."""

import logging
import sys
import time
from collections.abc import Callable

import msgspec

from sluice.engine.config import EngineConfig
from sluice.engine.frames import LoadFailed, Ready, StepFrame
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.loop.load import load_draft_runner, load_runner
from sluice.engine.process.block_exchange import SocketExchange
from sluice.engine.process.bootstrap import bootstrap, collect_rarely, freeze_heap
from sluice.engine.process.kv_events import KvEventPublisher
from sluice.engine.process.transport import Transport
from sluice.engine.runners.base import Runner
from sluice.errors import ErrorCode, SluiceError
from sluice.priority import lower_process
from sluice.start_times import START_TIMES

log = logging.getLogger(__name__)


def serve(config: EngineConfig, transport: Transport, load: Callable[[EngineConfig], Runner]) -> int:
    """Load the model, report, and run until a Shutdown command. Returns the exit code."""
    started = time.perf_counter()
    START_TIMES.mark("imports, and the gateway connected")
    try:
        transport.listen(config.listening)
        runner = load(config)
        START_TIMES.mark("model loaded and compiled")
        draft_runner = load_draft_runner(config, runner.info)
        events = None if config.kv_events_endpoint is None else KvEventPublisher(config, runner.info.block_size)
        emit = transport.emit if events is None else _publishing(transport.emit, events)
        exchange = SocketExchange(transport, config.listening)
        executor = InflightExecutor(
            runner, config, transport.receive, emit, draft_runner=draft_runner, exchange=exchange
        )
        transport.offer_prefixes(executor.kv.pool)
        transport.offer_view(executor.view)
        if events is not None:
            executor.kv.observe(events.on_stored, events.on_removed)
    except SluiceError as error:
        transport.send_all(LoadFailed(error.code, error.message))
        return 1
    except Exception as error:
        log.exception("loading %s failed", config.model_path)
        transport.send_all(LoadFailed(ErrorCode.INTERNAL, f"loading {config.model_path} failed: {error}"))
        return 1
    freeze_heap()
    collect_rarely()
    START_TIMES.mark("executor made")
    for line in START_TIMES.lines():
        log.debug("start: %s", line)
    try:
        transport.send_all(Ready(msgspec.structs.replace(executor.info, load_seconds=time.perf_counter() - started)))
        executor.run()
    finally:
        runner.close()
        if events is not None:
            events.close()
        if draft_runner is not None:
            draft_runner.close()
    return 0


def _publishing(emit: Callable[[StepFrame], None], events: KvEventPublisher) -> Callable[[StepFrame], None]:
    """Return `emit` that publishes the cache's events too, after the tokens have left."""

    def emit_both(frame: StepFrame) -> None:
        emit(frame)
        events.publish()

    return emit_both


def main(argv: list[str], load: Callable[[EngineConfig], Runner] = load_runner) -> int:
    """Serve the runner that `load` returns until a Shutdown command or the gateway's end. Returns the exit code."""
    lower_process()
    with bootstrap(argv) as (config, transport):
        return serve(config, transport, load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
