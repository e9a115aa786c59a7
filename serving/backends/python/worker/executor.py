"""Batches through the model's `execute`, and its answers."""

import asyncio
import importlib
import importlib.util
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from time import perf_counter_ns
from types import CoroutineType, ModuleType, TracebackType
from typing import Any

import msgspec

from serving.backends.python.frames import ExecuteBatch, Execution, WireRequest
from serving.backends.python.worker.channel import Channel
from serving.backends.python.worker.model_config import using_decoupled_model_transaction_policy
from serving.backends.python.worker.request import InferenceRequest
from serving.backends.python.worker.response import RESPONSE_COMPLETE_FINAL, InferenceResponse, Responder
from serving.backends.python.worker.tensor import Tensor

_CLASS_NAME = "TritonPythonModel"
_WORKER_FOLDER = str(Path(__file__).parent)


class _InvalidResult(Exception):
    """What the model returned is not what it should; the message is the whole of it."""


class Executor:
    """Runs one model, a batch at a time, on the main thread."""

    def __init__(self, channel: Channel, model: Any, args: dict[str, str]) -> None:
        """`args` as `initialize` gets them."""
        config = msgspec.json.decode(args["model_config"])
        self._channel = channel
        self._execute = model.execute
        self._is_decoupled = using_decoupled_model_transaction_policy(config)
        self._outputs = tuple(each["name"] for each in config["output"])
        self._model_name = args["model_name"]
        self._model_version = int(args["model_version"])
        self._instance_name = args["model_instance_name"]
        self._label = f"Failed to process the request(s) for model '{self._instance_name}'"

    def run(self, batch: ExecuteBatch) -> None:
        """Answer every request of the batch, or see to it that its threads do. Raises nothing; does not flush."""
        taken_ns = perf_counter_ns()
        requests = [self._request(wire) for wire in batch.requests]
        answers = [request._answer for request in requests]
        started_ns = perf_counter_ns()
        try:
            returned = self._execute(requests)
            if isinstance(returned, CoroutineType) and self._is_decoupled:
                self._start(returned, answers)
            else:
                self._respond(_result(returned), answers)
                self._reschedule(answers)
        except _InvalidResult as error:
            self._fail(answers, str(error))
        except BaseException as error:  # SystemExit, too, is one batch's failure
            self._fail(answers, describe_error(error))
        self._channel.post(Execution(taken_ns, started_ns, perf_counter_ns()))

    def _request(self, wire: WireRequest) -> InferenceRequest:
        wire.outputs = wire.outputs or self._outputs
        answer = Responder(self._channel, wire.number, wire.outputs, self._is_decoupled, self._label)
        channel = self._channel
        inputs = [Tensor.received(each.name, each.datatype, each.shape, channel.open(each.raw)) for each in wire.inputs]
        return InferenceRequest.received(wire, inputs, answer, self._model_name, self._model_version)

    def _start(self, coroutine: "CoroutineType[Any, Any, Any]", answers: list[Responder]) -> None:
        """Let a decoupled model's coroutine go on beside the next batches, as the real server has it."""

        def end(error: BaseException | None) -> None:
            if error is not None:
                self._fail(answers, describe_error(error))
            else:
                self._reschedule(answers)
            self._channel.flush()

        _start_coroutine(coroutine, end)

    def _respond(self, returned: Any, answers: list[Responder]) -> None:
        if self._is_decoupled:
            if returned is not None:
                raise _InvalidResult(
                    f"Python model '{self._instance_name}' is using the decoupled mode "
                    "and the execute function must return None."
                )
            return
        if returned is None:  # then the responses come through the senders
            return
        self._check(returned, answers)
        for answer, response in zip(answers, returned, strict=True):
            if response is not None:
                self._respond_one(answer, response)

    def _respond_one(self, answer: Responder, response: InferenceResponse) -> None:
        try:
            answer.post(response, RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            self._fail([answer], describe_error(error))

    def _check(self, returned: Any, answers: list[Responder]) -> None:
        num_requests = len(answers)
        if not isinstance(returned, list):
            raise _InvalidResult(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != num_requests:
            raise _InvalidResult(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{num_requests}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for response, answer in zip(returned, answers, strict=True):
            if response is not None and answer.is_wanted_again:
                raise _InvalidResult(  # spelled as the real server does
                    "Expected a None object in the execute function return list for reschduled request, "
                    f"found type '{type(response)}'."
                )
            if response is not None and not isinstance(response, InferenceResponse):
                raise _InvalidResult(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )

    def _reschedule(self, answers: list[Responder]) -> None:
        for answer in answers:
            if answer.is_wanted_again:
                answer.reschedule()

    def _fail(self, answers: list[Responder], message: str) -> None:
        for answer in answers:
            answer.fail(f"{self._label}, message: {message}")


def _result(returned: Any) -> Any:
    """What `execute` has returned, or its coroutine does."""
    if not isinstance(returned, CoroutineType):
        return returned
    return _run_coroutine(returned)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="model-coroutines", daemon=True).start()
    return loop


def _run_coroutine(coroutine: Any) -> Any:
    """Run it to its end. Raises what it raises."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


def _start_coroutine(coroutine: Any, end: Callable[[BaseException | None], None]) -> None:
    """Run it beside; `end` gets its error or None, on the loop's thread."""

    async def run() -> None:
        try:
            await coroutine
        except BaseException as error:
            end(error)
            raise
        end(None)

    asyncio.run_coroutine_threadsafe(run(), _loop())


def import_model(file: Path) -> Any:
    """The model's class. The folder of its version is a package, so that it may import `from .` what lies there.

    Modules beside the file, and beside its version's folder, can be imported by their names too, behind all others.
    """
    if file.suffix != ".py":
        raise ImportError(f"Model name must end with '.py'. Model name is \"{file.name}\".")
    if not file.is_file():
        raise FileNotFoundError(f"the model file '{file}' does not exist")
    # A model's folder is not ours to write into, and who polls it would take a cache for a change.
    sys.dont_write_bytecode = True
    sys.path += [str(file.parent), str(file.parent.parent)]
    _add_package(file.parent)
    module = importlib.import_module(f"{file.parent.name}.{file.stem}")
    return getattr(module, _CLASS_NAME)


def _add_package(folder: Path) -> None:
    """The folder as a package of its name, whatever else of that name can be found on the path."""
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
    """The error and where it was raised, innermost first, as the real server writes it."""
    text = f"{type(error).__name__}: {error}"
    places = _places(error.__traceback__)
    if places:
        text += "\n\nAt:\n" + "".join(f"  {place}\n" for place in places)
    return text


def _places(traceback: TracebackType | None) -> list[str]:
    """The frames of the model and of what it called, without ours and the importing machinery's."""
    places = []
    while traceback is not None:
        code = traceback.tb_frame.f_code
        file = code.co_filename
        if not file.startswith((_WORKER_FOLDER, "<frozen importlib")) and "importlib/__init__" not in file:
            places.append(f"{file}({traceback.tb_lineno}): {code.co_name}")
        traceback = traceback.tb_next
    return places[::-1]
