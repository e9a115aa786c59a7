"""Requests from one Python model to another model: the gateway's side."""

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.base import ModelLookup
from pipelines.backends.python.frames import Call, Called
from pipelines.backends.python.process import WorkerProcess
from pipelines.backends.python.wire import reply_of, request_of
from pipelines.inference.job import Job
from pipelines.inference.types import InferResponse


class ModelCalls:
    """What one worker's model has asked of others, and is not answered yet. They end with the worker."""

    def __init__(self, models: ModelLookup, process: WorkerProcess) -> None:
        self._models = models
        self._process = process
        self._jobs: dict[int, Job | None] = {}

    def begin(self, call: Call) -> None:
        """Submit it; its responses, or why there is none, go to the worker."""
        number = call.request.number
        self._jobs[number] = None
        try:
            job = self._submit(call)
        except SluiceError as error:
            self._pass_on(number, InferResponse(error=error))
            return
        if number in self._jobs:
            self._jobs[number] = job

    def _submit(self, call: Call) -> Job:
        model = self._models.find(call.model_name, call.version)
        request = request_of(call.request, self._process)
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
        self._process.send(Called(reply_of(number, response, self._process)), is_urgent=response.is_final)

    def end(self, number: int) -> None:
        """The worker wants no more of it. Harmless after its end."""
        job = self._jobs.pop(number, None)
        if job is not None:
            job.cancel()

    def close(self) -> None:
        """Cancel all."""
        for number in list(self._jobs):
            self.end(number)
