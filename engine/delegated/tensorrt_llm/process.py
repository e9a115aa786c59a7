"""TensorRT-LLM as an engine process: `python -m engine.delegated.tensorrt_llm.process`.

Its arguments are those of `engine.process`.
"""

import asyncio
import logging
import os
import sys
import threading
import time

import msgspec

from engine.config import EngineConfig
from engine.delegated.tensorrt_llm.loading import load_llm, warm_up
from engine.delegated.tensorrt_llm.loop.executor import TensorRtLlmExecutor
from engine.delegated.tensorrt_llm.loop.failures import EngineLost
from engine.delegated.tensorrt_llm.loop.llm import Llm
from engine.frames import LoadFailed, Ready, StepFrame
from engine.process.bootstrap import bootstrap
from engine.process.transport import Transport
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

SHUTDOWN_S = 3.5
"""How long TensorRT-LLM may take to end; the gateway waits for a little longer."""
EXIT_S = 1.0
"""Then: how long what is left of it, threads and handlers at exit, may keep this process from ending."""


def serve(config: EngineConfig, transport: Transport) -> int:
    """Load, report, run until told to stop or TensorRT-LLM is lost. Returns the exit code."""
    started = time.perf_counter()
    try:
        llm = load_llm(config)
        return asyncio.run(_run(llm, config, transport, started))
    except SluiceError as error:
        transport.send_all(LoadFailed(error.code, error.message))
    except Exception as error:
        log.exception("loading %s failed", config.model_path)
        transport.send_all(LoadFailed(ErrorCode.INTERNAL, f"loading {config.model_path} failed: {error}"))
    return 1


async def _run(llm: Llm, config: EngineConfig, transport: Transport, started: float) -> int:
    """Raises only before the engine is ready."""
    info, iteration = await warm_up(llm, config)
    info = msgspec.structs.replace(info, load_seconds=time.perf_counter() - started)
    commands = Commands(transport)
    executor = TensorRtLlmExecutor(llm, info, config, commands.emit, iteration=iteration)
    transport.send_all(Ready(info))
    commands.start(executor)
    try:
        code = await _serve_until_the_end(executor)
    finally:
        commands.stop()
    if code == 0:
        await _shut_down(llm)
    _exit_soon(code)
    return code


async def _serve_until_the_end(executor: TensorRtLlmExecutor) -> int:
    """Returns the exit code."""
    try:
        await executor.run()
    except EngineLost as error:
        log.critical("%s; this engine ends", error)
        return 1
    except Exception:
        log.critical("the loop failed; this engine ends", exc_info=True)
        return 1
    return 0


class Commands:
    """The socket on the event loop: what comes goes to the executor, its frames go out."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._executor: TensorRtLlmExecutor | None = None
        self._is_due = False

    def start(self, executor: TensorRtLlmExecutor) -> None:
        self._executor = executor
        asyncio.get_running_loop().add_reader(self._transport.fileno(), self._receive)
        self._receive()

    def stop(self) -> None:
        asyncio.get_running_loop().remove_reader(self._transport.fileno())
        self._executor = None

    def emit(self, frame: StepFrame) -> None:
        self._transport.emit(frame)
        if not self._is_due:  # sending has taken the news of what came meanwhile
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        self._is_due = False
        if self._executor is not None and (commands := self._transport.receive(0.0)):
            self._executor.obey(commands)


def _exit_soon(code: int) -> None:
    """End this process, whatever still waits for what is lost. What is left of its session its client kills."""
    timer = threading.Timer(EXIT_S, os._exit, (code,))
    timer.daemon = True
    timer.start()


async def _shut_down(llm: Llm) -> None:
    """Within bounds: a rank that is lost may never answer. What is left of it then is killed with this session."""
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def shut_down() -> None:
        try:
            llm.shutdown()
        except Exception as error:
            log.warning("shutting TensorRT-LLM down failed: %s", error)
        loop.call_soon_threadsafe(done.set)

    threading.Thread(target=shut_down, name="shutdown", daemon=True).start()
    try:
        await asyncio.wait_for(done.wait(), SHUTDOWN_S)
    except TimeoutError:
        log.warning("TensorRT-LLM did not end within %g s", SHUTDOWN_S)


def main(argv: list[str]) -> int:
    """Serve until told to stop or left alone. Returns the exit code."""
    with bootstrap(argv) as (config, transport):
        return serve(config, transport)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
