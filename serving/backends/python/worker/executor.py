"""Loads a model's Python file and runs batches through its `execute`."""

import importlib
import importlib.util
import inspect
import sys
import threading
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from types import CoroutineType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from sluice.serving.backends.python.frames import ExecuteBatch, Execution, WireRequest, WorkerLogLine
from sluice.serving.backends.python.worker.channel import Channel
from sluice.serving.backends.python.worker.model_config import using_decoupled_model_transaction_policy
from sluice.serving.backends.python.worker.request import InferenceRequest
from sluice.serving.backends.python.worker.response import RESPONSE_COMPLETE_FINAL, InferenceResponse, Responder
from sluice.serving.backends.python.worker.tensor import PbTensor

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop
    from concurrent.futures import Future

MAX_FRAMES = 40
"""Most frames of an error's description: the innermost and the outermost ones."""
_ERROR = 40
"""The level of `logging`."""
_CLASS_NAME = "TritonPythonModel"
_WORKER_FOLDER = str(Path(__file__).parent)


class _InvalidResult(Exception):
    """The model has returned something invalid; the message is complete."""


class Executor:
    """Runs one model, a batch at a time, on the main thread.

    Coroutines run on an event loop in a thread of its own. Only a model that has them imports asyncio, which takes a
    fifth of the start of a worker: while it loads, where `execute` is a coroutine function.
    """

    def __init__(self, channel: Channel, model: Any, args: dict[str, str]) -> None:
        """`args` are those that `initialize` gets."""
        config = msgspec.json.decode(args["model_config"])
        self._channel = channel
        self._execute = model.execute
        if inspect.iscoroutinefunction(model.execute):
            _loop()
        self._is_decoupled = using_decoupled_model_transaction_policy(config)
        self._outputs = tuple(each["name"] for each in config["output"])
        self._model_name = args["model_name"]
        self._model_version = int(args["model_version"])
        self._instance_name = args["model_instance_name"]
        self._label = f"Failed to process the request(s) for model '{self._instance_name}'"

    def run(self, batch: ExecuteBatch) -> None:
        """Run a batch, whose responses come now, or later from the model's threads. Never raises; does not flush."""
        received_ns = perf_counter_ns()
        requests = [self._request(wire) for wire in batch.requests]
        responders = [request._responder for request in requests]
        started_ns = perf_counter_ns()
        try:
            returned = self._execute(requests)
            if isinstance(returned, CoroutineType) and self._is_decoupled:
                _start(self._finish(returned, responders))
            else:
                if isinstance(returned, CoroutineType):
                    returned = _start(returned).result()
                self._respond(returned, responders)
                self._reschedule(responders)
        except _InvalidResult as error:
            self._fail(responders, str(error))
        except BaseException as error:  # even SystemExit fails only one batch
            self._fail(responders, self._describe(error))
        self._channel.post(Execution(received_ns, started_ns, perf_counter_ns()))

    def _request(self, wire: WireRequest) -> InferenceRequest:
        wire.outputs = wire.outputs or self._outputs
        responder = Responder(self._channel, wire.number, wire.outputs, self._is_decoupled, self._label)
        channel = self._channel
        inputs = [
            PbTensor.from_wire(each.name, each.datatype, each.shape, channel.open(each.raw)) for each in wire.inputs
        ]
        return InferenceRequest.from_wire(wire, inputs, responder, self._model_name, self._model_version)

    async def _finish(self, coroutine: "CoroutineType[Any, Any, Any]", responders: list[Responder]) -> None:
        """Run a decoupled model's coroutine, as in Triton concurrently with the next batches."""
        try:
            await coroutine
        except BaseException as error:
            self._fail(responders, self._describe(error))
            raise
        else:
            self._reschedule(responders)
        finally:
            self._channel.flush()

    def _respond(self, returned: Any, responders: list[Responder]) -> None:
        if self._is_decoupled:
            if returned is not None:
                raise _InvalidResult(
                    f"Python model '{self._instance_name}' is using the decoupled mode "
                    "and the execute function must return None."
                )
            return
        if returned is None:  # the model uses response senders
            return
        self._check_result(returned, responders)
        for responder, response in zip(responders, returned, strict=True):
            if response is not None:
                self._send_response(responder, response)

    def _send_response(self, responder: Responder, response: InferenceResponse) -> None:
        try:
            responder.post(response, RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            self._fail([responder], self._describe(error))

    def _check_result(self, returned: Any, responders: list[Responder]) -> None:
        num_requests = len(responders)
        if not isinstance(returned, list):
            raise _InvalidResult(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != num_requests:
            raise _InvalidResult(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{num_requests}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for response, responder in zip(returned, responders, strict=True):
            if response is not None and responder.is_rescheduled:
                raise _InvalidResult(  # Triton's spelling
                    "Expected a None object in the execute function return list for reschduled request, "
                    f"found type '{type(response)}'."
                )
            if response is not None and not isinstance(response, InferenceResponse):
                raise _InvalidResult(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )

    def _reschedule(self, responders: list[Responder]) -> None:
        for responder in responders:
            if responder.is_rescheduled:
                responder.reschedule()

    def _describe(self, error: BaseException) -> str:
        """Describe an error for clients. Of endless recursion they are told the message, and the log has the frames."""
        if not isinstance(error, RecursionError):
            return describe_error(error)
        self._channel.post(WorkerLogLine(_ERROR, "execute", describe_error(error)))
        return _message(error)

    def _fail(self, responders: list[Responder], message: str) -> None:
        for responder in responders:
            responder.fail(f"{self._label}, message: {message}")


def _start(coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
    from asyncio import run_coroutine_threadsafe

    return run_coroutine_threadsafe(coroutine, _loop())


@cache
def _loop() -> "AbstractEventLoop":
    from asyncio import new_event_loop

    loop = new_event_loop()
    threading.Thread(target=loop.run_forever, name="model-coroutines", daemon=True).start()
    return loop


def import_model(file: Path, version_folder: str = "") -> Any:
    """Import the model's class. The file's folder becomes a package, so that `from .` imports files in it.

    Modules beside the file, beside its folder and in `version_folder` can also be imported by name, after all others.
    """
    if file.suffix != ".py":
        raise ImportError(f"Model name must end with '.py'. Model name is \"{file.name}\".")
    if not file.is_file():
        raise FileNotFoundError(f"the model file '{file}' does not exist")
    # A byte code cache in the model's folder would look like a change to the repository that polls it.
    sys.dont_write_bytecode = True
    sys.path += [str(file.parent), str(file.parent.parent), *([version_folder] if version_folder else [])]
    _add_package(file.parent)
    module = importlib.import_module(f"{file.parent.name}.{file.stem}")
    return getattr(module, _CLASS_NAME)


def _add_package(folder: Path) -> None:
    """Make the folder a package of its name, even if the path has another module of that name."""
    init = folder / "__init__.py"
    if not init.is_file():
        sys.modules[folder.name] = package = ModuleType(folder.name)
        package.__path__ = [str(folder)]
        return
    spec = importlib.util.spec_from_file_location(folder.name, init, submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    sys.modules[folder.name] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


def describe_error(error: BaseException) -> str:
    """Describe an error and where it was raised, innermost frame first, in Triton's format."""
    text = _message(error)
    frames = _format_frames(error.__traceback__)
    if frames:
        text += "\n\nAt:\n" + "".join(f"  {frame}\n" for frame in frames)
    return text


def _message(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception as broken:  # of the model's own `__str__`
        return f"{type(error).__name__}, whose text cannot be read: {type(broken).__name__}"


def _format_frames(traceback: TracebackType | None) -> list[str]:
    """Format the frames of the model and the code it called, without those of the worker and of the import system."""
    frames = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        file = code.co_filename
        if not file.startswith((_WORKER_FOLDER, "<frozen importlib")) and "importlib/__init__" not in file:
            frames.append(f"{file}({traceback.tb_lineno}): {code.co_name}")
        traceback = traceback.tb_next
    frames.reverse()
    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        frames[half:-half] = [f"... {len(frames) - 2 * half} frames between them ..."]
    return frames
