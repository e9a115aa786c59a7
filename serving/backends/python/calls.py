"""Requests from one Python model to another model: the gateway's side."""

from serving.backend import ModelLookup
from serving.backends.python.connection import Connection
from serving.backends.python.frames import Call, Called
from serving.backends.python.wire import reply_of, request_of
from serving.job import InferJob
from serving.request import InferResponse
from sluice.errors import ErrorCode, SluiceError


class ModelCalls:
    """What one worker's model has asked of others, and is not answered yet. They end with the worker."""

    def __init__(self, models: ModelLookup, connection: Connection) -> None:
        self._models = models
        self._connection = connection
        self._jobs: dict[int, InferJob | None] = {}

    def begin(self, call: Call) -> None:
        """Submit it; its responses, or why there is none, go to the worker."""
        number = call.request.number
        self._jobs[number] = None
        try:
            job = self._submit(call)
        except SluiceError as error:
            reason = f"Model {call.model_name} - Error when running inference: {error.message}"
            self._pass_on(number, InferResponse(error=SluiceError(error.code, reason)))
            return
        if number in self._jobs:
            self._jobs[number] = job

    def _submit(self, call: Call) -> InferJob:
        # First: whatever is wrong with the call, its tensors are given back.
        request = request_of(call.request, self._connection)
        model = self._models.find(call.model_name, call.version)
        if model.is_decoupled_for(request) and not call.is_decoupled:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"Model {call.model_name} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.",
            )
        number = call.request.number
        return model.submit(request, lambda response: self._pass_on(number, response))

    def _pass_on(self, number: int, response: InferResponse) -> None:
        if number not in self._jobs:
            return
        if response.is_final:
            del self._jobs[number]
        self._connection.send(Called(reply_of(number, response, self._connection)), is_urgent=response.is_final)

    def end(self, number: int) -> None:
        """The worker wants no more of it: one under way is cancelled, and answered so. Harmless after its end."""
        if number not in self._jobs:
            return
        job = self._jobs[number]
        self._pass_on(number, InferResponse(error=SluiceError(ErrorCode.CANCELLED, "the call was cancelled")))
        if job is not None:
            job.cancel()

    def close(self) -> None:
        """Cancel all."""
        for number in list(self._jobs):
            self.end(number)
