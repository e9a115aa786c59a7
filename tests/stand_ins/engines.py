"""Engines of TensorRT-LLM over its stand-in, forked from a process that has their imports, which are most of a start.

What starts is a process of its own as ever, in its own session, with its own socket, environment and end.
"""

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.reduction import DupFd
from threading import Lock
from typing import Any

import pytest

from sluice.engine.client.process import EngineProcess
from sluice.engine.delegated.process import run
from sluice.engine.delegated.tensorrt_llm.llm import load_llm
from tests.stand_ins.versions import STAND_INS
from tests.waiting import until

_MODULE = "sluice.engine.delegated.tensorrt_llm.process"
_NUM_ARGUMENTS = 4
_STDERR = 2
_FORKS = get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.stand_ins.preloaded"])
_LOCK = Lock()
"""Servers have event loops on threads of their own, and a process that is started looks after those that have ended."""
_start_anew = EngineProcess._start


def fork_engines(patch: pytest.MonkeyPatch) -> None:
    """Fork the engines that this process starts from now on. Those of other runtimes and of another Python start anew,
    as do those of other processes."""
    patch.setattr(EngineProcess, "_start", _start)


class _Stderr:
    """Standard error of this process, as it is now, for one that is forked elsewhere."""

    def __reduce__(self) -> Any:
        return _fd_of, (DupFd(_STDERR),)


def _fd_of(handed: Any) -> Any:
    return handed.detach()


class _Forked:
    """What an `EngineProcess` knows of its process."""

    def __init__(self, process: ForkServerProcess) -> None:
        self.pid = process.pid
        self.returncode: int | None = None


async def _start(self: EngineProcess, command: Sequence[str]) -> "asyncio.Future[int]":
    if tuple(command[:-_NUM_ARGUMENTS]) != (sys.executable, "-m", _MODULE):
        return await _start_anew(self, command)
    environment = dict(os.environ)  # noqa: TID251 - passed on
    process = _FORKS.Process(target=_run, args=(environment, command[-_NUM_ARGUMENTS:], _Stderr()), daemon=True)
    with _LOCK:
        process.start()
    await until(lambda: _is_apart(process.pid))
    self._process = forked = _Forked(process)  # type: ignore[assignment]
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[int] = loop.create_future()

    def end() -> None:
        loop.remove_reader(process.sentinel)
        with _LOCK:
            process.join()
        forked.returncode = process.exitcode
        if not exited.done():
            exited.set_result(process.exitcode or 0)

    loop.add_reader(process.sentinel, end)
    return exited


def _is_apart(pid: int | None) -> bool:
    """Say whether a process has its own session, by which it can be killed. One that has ended needs none."""
    try:
        return os.getsid(pid or 0) == pid
    except ProcessLookupError:
        return True


def _run(environment: Mapping[str, str], arguments: Sequence[str], stderr: int) -> None:
    """Become an engine in this environment, which names a version of the stand-in."""
    os.setsid()
    os.dup2(stderr, _STDERR)
    os.environ.clear()  # noqa: TID251 - it gets that of the process which asks for it
    os.environ.update(environment)  # noqa: TID251
    sys.path[:0] = environment["PYTHONPATH"].split(os.pathsep)
    STAND_INS.load(environment["STAND_IN_VERSION"])
    sys.exit(run([*arguments], load_llm))
