"""The engine process: `python -m engine.process ENDPOINT PARENT_PID LOG_LEVEL CONFIG_FILE`. Clients are DEALERs of its
ROUTER socket. The loop polls it between steps, so that no second thread competes for Python's lock."""

import logging
import sys
import time
from collections.abc import Callable

import msgspec

from engine.config import EngineConfig
from engine.frames import LoadFailed, Ready
from engine.loop.executor import InflightExecutor
from engine.loop.load import load_draft_runner, load_runner
from engine.process.bootstrap import bootstrap
from engine.process.transport import Transport
from engine.runners.base import Runner
from sluice.errors import ErrorCode, SluiceError
from sluice.priority import lower_process

log = logging.getLogger(__name__)


def serve(config: EngineConfig, transport: Transport, load: Callable[[EngineConfig], Runner]) -> int:
    """Load the model, report, and run until a Shutdown command. Returns the exit code."""
    started = time.perf_counter()
    try:
        runner = load(config)
        draft_runner = load_draft_runner(config, runner.info)
        executor = InflightExecutor(runner, config, transport, transport.emit, draft_runner=draft_runner)
    except SluiceError as error:
        transport.send_all(LoadFailed(error.code, error.message))
        return 1
    except Exception as error:
        log.exception("loading %s failed", config.model_path)
        transport.send_all(LoadFailed(ErrorCode.INTERNAL, f"loading {config.model_path} failed: {error}"))
        return 1
    try:
        transport.send_all(Ready(msgspec.structs.replace(executor.info, load_seconds=time.perf_counter() - started)))
        executor.run()
    finally:
        runner.close()
        if draft_runner is not None:
            draft_runner.close()
    return 0


def main(argv: list[str], load: Callable[[EngineConfig], Runner] = load_runner) -> int:
    """Serve the runner that `load` returns until a Shutdown command or the gateway's end. Returns the exit code."""
    lower_process()
    with bootstrap(argv) as (config, transport):
        return serve(config, transport, load)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
