"""One instance of a Python model as a process. `start.py` is its beginning.

Imports numpy and little else: a gateway may have many of these.
"""

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from time import perf_counter_ns
from types import FrameType

import msgspec

from serving.backends.python.frames import (
    CommandFailed,
    CompleteConfig,
    ConfigCompleted,
    ExecuteBatch,
    Initialize,
    Initialized,
    LogLine,
    WorkerStarted,
)
from serving.backends.python.shared_memory import BatchProgress
from serving.backends.python.worker import pb_utils
from serving.backends.python.worker.calls import BlsCalls
from serving.backends.python.worker.channel import Channel, watch_gateway
from serving.backends.python.worker.executor import Executor, describe_error, import_model
from serving.backends.python.worker.pb_utils import Logger
from serving.backends.python.worker.server import ServerProxy

MAX_UNSENT_NS = 300_000
"""Answers may wait so long for those of the batches that are here already, to be sent with them."""


def main(socket_fd: int, progress_fd: int) -> int:
    # The gateway decides when it ends. A handler and not SIG_IGN, which the processes of the model would inherit.
    signal.signal(signal.SIGTERM, _go_on)
    sock = socket.socket(fileno=socket_fd)
    sock.set_inheritable(False)
    progress = BatchProgress(progress_fd)
    os.close(progress_fd)
    watch_gateway(sock)
    channel = Channel(sock)
    _install_pb_utils(channel)
    channel.post(WorkerStarted())
    channel.flush()
    match channel.receive():
        case CompleteConfig() as command:
            return _complete(channel, command)
        case Initialize() as command:
            return _serve(channel, command, progress)
        case command:
            raise AssertionError(f"the first command is {command}")


def _go_on(signum: int, frame: FrameType | None) -> None:
    """Take no notice of a signal."""


def _install_pb_utils(channel: Channel) -> None:
    sys.modules["triton_python_backend_utils"] = pb_utils

    def write(level: int, place: str, message: str) -> None:
        channel.post(LogLine(level, place, message))
        channel.flush()

    Logger._write = write
    pb_utils.InferenceRequest._calls = BlsCalls(channel)
    ServerProxy._channel = channel


def _complete(channel: Channel, command: CompleteConfig) -> int:
    file = Path(command.model_file)
    pb_utils.set_model_dir(str(file.parent))
    try:
        function = getattr(import_model(file), "auto_complete_config", None)
        completed = function(pb_utils.ModelConfig(command.config_json)) if function is not None else None
    except BaseException as error:
        return _fail(channel, describe_error(error))
    if function is None:
        channel.post(ConfigCompleted(command.config_json))
    elif isinstance(completed, pb_utils.ModelConfig):
        channel.post(ConfigCompleted(msgspec.json.encode(completed.as_dict()).decode()))
    else:
        return _fail(
            channel,
            f"auto_complete_config function in model '{command.model_name}' must return a valid pb.ModelConfig object.",
        )
    channel.flush()
    return 0


def _serve(channel: Channel, command: Initialize, progress: BatchProgress) -> int:
    file = Path(command.model_file)
    pb_utils.set_model_dir(str(file.parent))
    try:
        model = import_model(file)()
        if not callable(getattr(model, "execute", None)):
            raise AttributeError(f"the class TritonPythonModel in '{file}' has no method 'execute'")
        if hasattr(model, "initialize"):
            model.initialize(dict(command.args))
    except BaseException as error:
        return _fail(channel, describe_error(error))
    # What the model holds now it keeps; looking through it again and again would only cost time.
    gc.collect()
    gc.freeze()
    channel.post(Initialized())
    channel.flush()
    _run(channel, Executor(channel, model, command.args), progress)
    if hasattr(model, "finalize"):
        model.finalize()
    # What its metrics have counted outlives the model; only one that deletes a family takes it away.
    ServerProxy.close()
    return 0


def _run(channel: Channel, executor: Executor, progress: BatchProgress) -> None:
    """Batches until the end is ordered."""
    flushed_ns = 0
    while isinstance(batch := channel.receive(), ExecuteBatch):
        progress.begin()
        executor.run(batch)
        del batch
        now = perf_counter_ns()
        if not channel.has_command or now - flushed_ns > MAX_UNSENT_NS:
            channel.flush()
            flushed_ns = now


def _fail(channel: Channel, message: str) -> int:
    channel.post(CommandFailed(message))
    channel.flush()
    return 1
