"""The server's services for the model in a worker: calls of other models, the repository, metrics."""

import asyncio
import logging
from collections.abc import Callable

from sluice.errors import ErrorCode, SluiceError, invalid_argument
from sluice.record.spans import Span, current_span
from sluice.serving.backend import (
    BackendContext,
    CustomMetric,
    CustomMetricFamily,
    CustomMetricKind,
    CustomMetrics,
    LoadOverrides,
    ModelLookup,
)
from sluice.serving.backends.python import frames
from sluice.serving.backends.python.connection import (
    WorkerConnection,
    from_wire_request,
    to_wire_error,
    to_wire_response,
)
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse

log = logging.getLogger(__name__)
FindSpan = Callable[[int], Span | None]
"""Takes the number of a worker's request, 0 for the only one."""


class WorkerCalls:
    """Calls of other models by one worker's model that have not ended. They end with the worker."""

    def __init__(self, models: ModelLookup, connection: WorkerConnection, find_span: FindSpan) -> None:
        self._models = models
        self._find_span = find_span
        self._connection = connection
        self._jobs: dict[int, InferJob | None] = {}

    def begin(self, call: frames.CallModel) -> None:
        """Submit a call. Its responses, or the error that prevents them, go to the worker."""
        number = call.request.number
        self._jobs[number] = None
        try:
            job = self._submit(call)
        except SluiceError as error:
            reason = f"Model {call.model_name} - Error when running inference: {error.message}"
            self._send(number, InferResponse(error=SluiceError(error.code, reason)))
            return
        if number in self._jobs:
            self._jobs[number] = job

    def _submit(self, call: frames.CallModel) -> InferJob:
        # First, because reading the tensors is what frees their segments, whatever is wrong with the call.
        request = from_wire_request(call.request, self._connection)
        model = self._models.find(call.model_name, call.version)
        if model.is_decoupled_for(request) and not call.is_decoupled:
            raise SluiceError(
                ErrorCode.UNIMPLEMENTED,
                f"Model {call.model_name} is using the decoupled. The current BLS request call doesn't support models "
                "using the decoupled transaction policy. Please use 'decoupled=True' argument to the 'exec' or "
                "'async_exec' calls for decoupled models.",
            )
        number = call.request.number
        above = current_span.set(self._find_span(call.works_for))
        try:
            return model.submit(request, lambda response: self._send(number, response))
        finally:
            current_span.reset(above)

    def _send(self, number: int, response: InferResponse) -> None:
        if number not in self._jobs:
            return
        if response.is_final:
            del self._jobs[number]
        self._connection.send(
            frames.CallResponse(to_wire_response(number, response, self._connection)), is_urgent=response.is_final
        )

    def cancel(self, number: int) -> None:
        """Cancel a call and send its final response. Does nothing after the call has ended."""
        if number not in self._jobs:
            return
        job = self._jobs[number]
        self._send(number, InferResponse(error=SluiceError(ErrorCode.CANCELLED, "the call was cancelled")))
        if job is not None:
            job.cancel()

    def close(self) -> None:
        for number in list(self._jobs):
            self.cancel(number)


class WorkerMetrics:
    """Metric families and metrics by the worker's numbers. Families and their series outlive the worker."""

    def __init__(self, metrics: CustomMetrics | None) -> None:
        self._all = metrics
        self._families: dict[int, CustomMetricFamily] = {}
        self._metrics: dict[int, CustomMetric] = {}

    def use(self, request: frames.CreateMetricFamily | frames.CreateMetric | frames.UseMetric) -> float | None:
        """Create or use a metric. Raises SluiceError where that is not possible."""
        match request:
            case frames.CreateMetricFamily():
                self._families[request.family] = self._family(request)
            case frames.CreateMetric(metric, family, labels, buckets):
                self._metrics[metric] = self._families[family].metric(labels, buckets)
            case frames.UseMetric():
                return self._use(request)
        return None

    def _family(self, request: frames.CreateMetricFamily) -> CustomMetricFamily:
        if self._all is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server runs without metrics")
        return self._all.family(request.name, request.description, CustomMetricKind(request.kind))

    def _use(self, request: frames.UseMetric) -> float | None:
        metric = self._metrics[request.metric]
        match request.operation:
            case "increment":
                metric.increment(request.value)
            case "set":
                metric.set(request.value)
            case "observe":
                metric.observe(request.value)
            case _:
                return metric.value()
        return None

    def release(self, numbers: list[int]) -> None:
        """Release families and metrics that the model no longer refers to."""
        for number in numbers:
            released = self._metrics.pop(number, None) or self._families.pop(number, None)
            if released is not None:
                released.release()


class WorkerServices:
    """Serves one worker process until it ends. Event loop's thread only."""

    def __init__(
        self, model_name: str, context: BackendContext, connection: WorkerConnection, find_span: FindSpan
    ) -> None:
        """`find_span` returns where the time of one of the worker's requests is noted."""
        self._model_name = model_name
        self._context = context
        self._connection = connection
        self._calls = WorkerCalls(context.models, connection, find_span)
        self._metrics = WorkerMetrics(context.custom_metrics)
        self._changes: set[asyncio.Task[None]] = set()
        self.is_loading = True
        """Whether the model is still being initialized."""

    def handle(self, message: frames.ServiceRequest) -> None:
        match message:
            case frames.CallModel():
                self._calls.begin(message)
            case frames.CancelCall(number):
                self._calls.cancel(number)
            case frames.ReleaseMetrics(numbers):
                self._metrics.release(numbers)
            case frames.ServerCall():
                self._handle_server_call(message)

    def _handle_server_call(self, message: frames.ServerCall) -> None:
        match message.request:
            case frames.LoadModel() | frames.UnloadModel() as request:
                task = asyncio.get_running_loop().create_task(self._change(message.number, request))
                self._changes.add(task)
                task.add_done_callback(self._changes.discard)
                return
            case frames.CheckModelReady(name, version):
                response = frames.ServerResponse(message.number, self._is_ready(name, version))
            case frames.CreateMetricFamily() | frames.CreateMetric() | frames.UseMetric() as request:
                try:
                    response = frames.ServerResponse(message.number, self._metrics.use(request))
                except SluiceError as error:
                    response = frames.ServerResponse(message.number, error=to_wire_error(error))
        self._connection.send(response)

    def _is_ready(self, name: str, version: int) -> bool:
        try:
            return self._context.models.find(name, version).is_ready
        except SluiceError:
            return False

    async def _change(self, number: int, request: frames.LoadModel | frames.UnloadModel) -> None:
        response = frames.ServerResponse(number)
        try:
            await self._change_repository(request)
        except SluiceError as error:
            response = frames.ServerResponse(number, error=to_wire_error(error))
        except Exception as error:
            log.exception("the request of a model for '%s' failed", request.name)
            response = frames.ServerResponse(
                number, error=to_wire_error(SluiceError(ErrorCode.INTERNAL, f"internal error: {error}"))
            )
        self._connection.send(response)

    async def _change_repository(self, request: frames.LoadModel | frames.UnloadModel) -> None:
        control = self._context.control
        if control is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "this server has no model repository to load from")
        if self.is_loading and request.name == self._model_name:
            raise invalid_argument(f"model '{request.name}' is being loaded, and waits for itself")
        match request:
            case frames.LoadModel(name, config_json, files):
                await control.load(name, LoadOverrides(config_json or None, tuple(files.items())))
            case frames.UnloadModel(name, unload_dependents):
                await control.unload(name, unload_dependents)

    def end_calls(self) -> None:
        """Cancel all calls, so that the model can finish."""
        self._calls.close()

    def close(self) -> None:
        """Cancel the calls of a worker that has ended. Loads that it requested go on, and its metrics stay."""
        self._calls.close()
        for task in self._changes:
            task.cancel()


def refuse_request(message: frames.ServiceRequest, connection: WorkerConnection, reason: str) -> None:
    """Respond with an error to a worker that may not use the services."""
    error = to_wire_error(SluiceError(ErrorCode.UNIMPLEMENTED, reason))
    match message:
        case frames.CallModel():
            connection.send(frames.CallResponse(frames.WireResponse(message.request.number, True, error=error)))
        case frames.ServerCall(number):
            connection.send(frames.ServerResponse(number, error=error))
