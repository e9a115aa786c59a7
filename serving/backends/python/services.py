"""What a worker's model may ask of the server: other models, the repository, metrics."""

import asyncio
import logging

from serving.backend import BackendContext, LoadOverrides, ModelLookup
from serving.backends.python.connection import Connection, from_wire_request, to_wire_error, to_wire_response
from serving.backends.python.frames import (
    CallModel,
    CallResponse,
    CallServer,
    CancelCall,
    CheckModelReady,
    CreateMetric,
    CreateMetricFamily,
    LoadModel,
    ReleaseMetrics,
    ServerResponse,
    ServiceRequest,
    UnloadModel,
    UseMetric,
    WireResponse,
)
from serving.custom_metrics import CustomMetric, CustomMetrics, MetricFamily, MetricKind
from serving.job import Job
from serving.request import InferResponse
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)


class WorkerCalls:
    """What one worker's model has asked of others, and is not answered yet. They end with the worker."""

    def __init__(self, models: ModelLookup, connection: Connection) -> None:
        self._models = models
        self._connection = connection
        self._jobs: dict[int, Job | None] = {}

    def begin(self, call: CallModel) -> None:
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

    def _submit(self, call: CallModel) -> Job:
        # First: whatever is wrong with the call, its tensors are given back.
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
        return model.submit(request, lambda response: self._pass_on(number, response))

    def _pass_on(self, number: int, response: InferResponse) -> None:
        if number not in self._jobs:
            return
        if response.is_final:
            del self._jobs[number]
        self._connection.send(
            CallResponse(to_wire_response(number, response, self._connection)), is_urgent=response.is_final
        )

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


class WorkerMetrics:
    """By the worker's numbers. Families stay when the worker ends, and so do their series."""

    def __init__(self, metrics: CustomMetrics | None) -> None:
        self._all = metrics
        self._families: dict[int, MetricFamily] = {}
        self._metrics: dict[int, CustomMetric] = {}

    def answer(self, question: CreateMetricFamily | CreateMetric | UseMetric) -> float | None:
        """Do it. Raises SluiceError where it cannot be done."""
        match question:
            case CreateMetricFamily():
                self._families[question.family] = self._family(question)
            case CreateMetric(metric, family, labels, buckets):
                self._metrics[metric] = self._families[family].metric(labels, buckets)
            case UseMetric():
                return self._use(question)
        return None

    def _family(self, asked: CreateMetricFamily) -> MetricFamily:
        if self._all is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the server runs without metrics")
        return self._all.family(asked.name, asked.description, MetricKind(asked.kind))

    def _use(self, asked: UseMetric) -> float | None:
        metric = self._metrics[asked.metric]
        match asked.operation:
            case "increment":
                metric.increment(asked.value)
            case "set":
                metric.set(asked.value)
            case "observe":
                metric.observe(asked.value)
            case _:
                return metric.value()
        return None

    def let_go(self, numbers: list[int]) -> None:
        """The model holds these no more."""
        for number in numbers:
            held = self._metrics.pop(number, None) or self._families.pop(number, None)
            if held is not None:
                held.release()


class WorkerServices:
    """For one worker process, and no longer than that. Event loop's thread only."""

    def __init__(self, model_name: str, context: BackendContext, connection: Connection) -> None:
        self._model_name = model_name
        self._context = context
        self._connection = connection
        self._calls = WorkerCalls(context.models, connection)
        self._metrics = WorkerMetrics(context.custom_metrics)
        self._changes: set[asyncio.Task[None]] = set()
        self.is_loading = True
        """Whether the model is still being initialized."""

    def take(self, message: ServiceRequest) -> None:
        match message:
            case CallModel():
                self._calls.begin(message)
            case CancelCall(number):
                self._calls.end(number)
            case ReleaseMetrics(numbers):
                self._metrics.let_go(numbers)
            case CallServer():
                self._answer(message)

    def _answer(self, ask: CallServer) -> None:
        match ask.question:
            case LoadModel() | UnloadModel() as question:
                self._begin_change(ask.number, question)
                return
            case CheckModelReady(name, version):
                answer = ServerResponse(ask.number, self._is_ready(name, version))
            case CreateMetricFamily() | CreateMetric() | UseMetric() as question:
                answer = self._of_metrics(ask.number, question)
        self._connection.send(answer)

    def _is_ready(self, name: str, version: int) -> bool:
        try:
            return self._context.models.find(name, version).is_ready
        except SluiceError:
            return False

    def _of_metrics(self, number: int, question: CreateMetricFamily | CreateMetric | UseMetric) -> ServerResponse:
        try:
            return ServerResponse(number, self._metrics.answer(question))
        except SluiceError as error:
            return ServerResponse(number, error=to_wire_error(error))

    def _begin_change(self, number: int, question: LoadModel | UnloadModel) -> None:
        task = asyncio.get_running_loop().create_task(self._change(number, question))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _change(self, number: int, question: LoadModel | UnloadModel) -> None:
        answer = ServerResponse(number)
        try:
            await self._change_repository(question)
        except SluiceError as error:
            answer = ServerResponse(number, error=to_wire_error(error))
        except Exception as error:
            log.exception("the request of a model for '%s' failed", question.name)
            answer = ServerResponse(
                number, error=to_wire_error(SluiceError(ErrorCode.INTERNAL, f"internal error: {error}"))
            )
        self._connection.send(answer)

    async def _change_repository(self, question: LoadModel | UnloadModel) -> None:
        control = self._context.control
        if control is None:
            raise SluiceError(ErrorCode.UNAVAILABLE, "this server has no model repository to load from")
        if self.is_loading and question.name == self._model_name:
            raise SluiceError(ErrorCode.INVALID, f"model '{question.name}' is being loaded, and waits for itself")
        match question:
            case LoadModel(name, config_json, files):
                await control.load(name, LoadOverrides(config_json or None, tuple(files.items())))
            case UnloadModel(name, unload_dependents):
                await control.unload(name, unload_dependents)

    def end_calls(self) -> None:
        """Answer what is open: its model shall finish."""
        self._calls.close()

    def close(self) -> None:
        """The worker has ended: cancel its calls. Loads that it has asked for go on, and what it has counted stays."""
        self._calls.close()
        for task in self._changes:
            task.cancel()


def refuse_request(message: ServiceRequest, connection: Connection, reason: str) -> None:
    """Answer who may not ask."""
    error = to_wire_error(SluiceError(ErrorCode.UNIMPLEMENTED, reason))
    match message:
        case CallModel():
            connection.send(CallResponse(WireResponse(message.request.number, True, error=error)))
        case CallServer(number):
            connection.send(ServerResponse(number, error=error))
