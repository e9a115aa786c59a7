"""Batches through the model's `execute`, and its answers."""

from time import perf_counter_ns
from types import CoroutineType
from typing import Any

import msgspec

from serving.backends.python.frames import Batch, Execution, WireRequest
from serving.backends.python.worker.channel import Channel
from serving.backends.python.worker.model_config import using_decoupled_model_transaction_policy
from serving.backends.python.worker.model_file import describe
from serving.backends.python.worker.request import InferenceRequest
from serving.backends.python.worker.response import RESPONSE_COMPLETE_FINAL, Answer, InferenceResponse
from serving.backends.python.worker.tensor import Tensor


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

    def run(self, batch: Batch) -> None:
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
        except _Refused as error:
            self._fail(answers, str(error))
        except BaseException as error:  # SystemExit, too, is one batch's failure
            self._fail(answers, describe(error))
        self._channel.post(Execution(taken_ns, started_ns, perf_counter_ns()))

    def _request(self, wire: WireRequest) -> InferenceRequest:
        wire.outputs = wire.outputs or self._outputs
        answer = Answer(self._channel, wire.number, wire.outputs, self._is_decoupled, self._label)
        channel = self._channel
        inputs = [Tensor.received(each.name, each.datatype, each.shape, channel.open(each.raw)) for each in wire.inputs]
        return InferenceRequest.received(wire, inputs, answer, self._model_name, self._model_version)

    def _start(self, coroutine: "CoroutineType[Any, Any, Any]", answers: list[Answer]) -> None:
        """Let a decoupled model's coroutine go on beside the next batches, as the real server has it."""
        from serving.backends.python.worker import coroutines

        def end(error: BaseException | None) -> None:
            if error is not None:
                self._fail(answers, describe(error))
            else:
                self._reschedule(answers)
            self._channel.flush()

        coroutines.start(coroutine, end)

    def _respond(self, returned: Any, answers: list[Answer]) -> None:
        if self._is_decoupled:
            if returned is not None:
                raise _Refused(
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

    def _respond_one(self, answer: Answer, response: InferenceResponse) -> None:
        try:
            answer.post(response, RESPONSE_COMPLETE_FINAL)
        except Exception as error:
            self._fail([answer], describe(error))

    def _check(self, returned: Any, answers: list[Answer]) -> None:
        num_requests = len(answers)
        if not isinstance(returned, list):
            raise _Refused(f"Expected a list in the execute return, found type '{type(returned)}'.")
        if len(returned) != num_requests:
            raise _Refused(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{num_requests}, and InferenceResponse(s) size is:{len(returned)}\n"
            )
        for response, answer in zip(returned, answers, strict=True):
            if response is not None and answer.is_wanted_again:
                raise _Refused(  # spelled as the real server does
                    "Expected a None object in the execute function return list for reschduled request, "
                    f"found type '{type(response)}'."
                )
            if response is not None and not isinstance(response, InferenceResponse):
                raise _Refused(
                    "Expected an 'InferenceResponse' object in the execute function return list, "
                    f"found type '{type(response)}'."
                )

    def _reschedule(self, answers: list[Answer]) -> None:
        for answer in answers:
            if answer.is_wanted_again:
                answer.reschedule()

    def _fail(self, answers: list[Answer], message: str) -> None:
        for answer in answers:
            answer.fail(f"{self._label}, message: {message}")


def _result(returned: Any) -> Any:
    """What `execute` has returned, or its coroutine does."""
    if not isinstance(returned, CoroutineType):
        return returned
    from serving.backends.python.worker import coroutines

    return coroutines.result(returned)


class _Refused(Exception):
    """What the model returned is not what it should; the message is the whole of it."""
