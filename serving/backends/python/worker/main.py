"""Runs one instance of a Python model as a process; `start.py` calls it. Imports little: workers may be many."""

import gc
import os
import signal
import socket
import sys
from pathlib import Path
from time import perf_counter_ns

import msgspec

from sluice.serving.backends.python import frames
from sluice.serving.backends.python.shared_memory import BatchProgress
from sluice.serving.backends.python.worker import pb_utils
from sluice.serving.backends.python.worker.calls import BlsCalls
from sluice.serving.backends.python.worker.channel import Channel, watch_server
from sluice.serving.backends.python.worker.executor import Executor, describe_error, import_model
from sluice.serving.backends.python.worker.pb_utils import Logger
from sluice.serving.backends.python.worker.server import ServerProxy

MAX_UNSENT_NS = 300_000
"""Responses may wait this long for those of batches that have already arrived, to be sent together."""


def main(socket_fd: int, progress_fd: int) -> int:
    # The server decides when the worker ends. A handler, because processes of the model would inherit SIG_IGN.
    signal.signal(signal.SIGTERM, lambda *_: None)
    sock = socket.socket(fileno=socket_fd)
    sock.set_inheritable(False)
    progress = BatchProgress(progress_fd)
    os.close(progress_fd)
    watch_server(sock)
    channel = Channel(sock)
    _install_pb_utils(channel)
    channel.post(frames.WorkerStarted())
    channel.flush()
    match channel.receive():
        case frames.CompleteConfig() as command:
            return _complete_config(channel, command)
        case frames.Initialize() as command:
            return _serve_model(channel, command, progress)
        case command:
            raise AssertionError(f"the first command is {command}")


def _install_pb_utils(channel: Channel) -> None:
    for name in ("triton_python_backend_utils", "c_python_backend_utils"):
        sys.modules[name] = pb_utils

    def write(level: int, location: str, message: str) -> None:
        channel.post(frames.WorkerLogLine(level, location, message))
        channel.flush()

    Logger._write = write
    pb_utils.InferenceRequest._calls = BlsCalls(channel)
    ServerProxy._channel = channel


def _complete_config(channel: Channel, command: frames.CompleteConfig) -> int:
    file = Path(command.model_file)
    pb_utils.set_model_dir(command.version_folder or str(file.parent))
    try:
        function = getattr(import_model(file, command.version_folder), "auto_complete_config", None)
        completed = function(pb_utils.ModelConfig(command.config_json)) if function is not None else None
        if isinstance(completed, pb_utils.ModelConfig):
            command.config_json = msgspec.json.encode(completed.as_dict()).decode()
    except BaseException as error:
        return _fail(channel, describe_error(error))
    if function is not None and not isinstance(completed, pb_utils.ModelConfig):
        return _fail(
            channel,
            f"auto_complete_config function in model '{command.model_name}' must return a valid pb.ModelConfig object.",
        )
    channel.post(frames.ConfigCompleted(command.config_json))
    channel.flush()
    return 0


def _serve_model(channel: Channel, command: frames.Initialize, progress: BatchProgress) -> int:
    file = Path(command.model_file)
    pb_utils.set_model_dir(command.version_folder or str(file.parent))
    try:
        model = import_model(file, command.version_folder)()
        if not callable(getattr(model, "execute", None)):
            raise AttributeError(f"the class TritonPythonModel in '{file}' has no method 'execute'")
        if hasattr(model, "initialize"):
            model.initialize(dict(command.args))
    except BaseException as error:
        return _fail(channel, describe_error(error))
    # Objects that the model has now will stay, so the garbage collector need not look at them again.
    gc.collect()
    gc.freeze()
    channel.post(frames.Initialized())
    channel.flush()
    _run_batches(channel, Executor(channel, model, command.args), progress)
    if hasattr(model, "finalize"):
        model.finalize()
    # Metrics outlive the model: only a family that it deletes itself is released.
    ServerProxy.close()
    return 0


def _run_batches(channel: Channel, executor: Executor, progress: BatchProgress) -> None:
    """Run batches until the command to finalize."""
    flushed_ns = 0
    while isinstance(batch := channel.receive(), frames.ExecuteBatch):
        progress.begin()
        executor.run(batch)
        del batch
        now = perf_counter_ns()
        if not channel.has_command or now - flushed_ns > MAX_UNSENT_NS:
            channel.flush()
            flushed_ns = now


def _fail(channel: Channel, message: str) -> int:
    channel.post(frames.CommandFailed(message))
    channel.flush()
    return 1
