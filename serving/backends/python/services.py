"""What a worker's model may ask of the server: other models, the repository, metrics."""

import asyncio
import logging

from serving.backend import BackendContext, LoadOverrides
from serving.backends.python.calls import ModelCalls
from serving.backends.python.connection import Connection
from serving.backends.python.frames import (
    Answered,
    Ask,
    AskReady,
    Call,
    Called,
    EndCall,
    LetGo,
    LoadModel,
    MakeFamily,
    MakeMetric,
    Reply,
    UnloadModel,
    UseMetric,
)
from serving.backends.python.metrics import ModelMetrics
from serving.backends.python.wire import wire_error
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)

Asking = Call | EndCall | Ask | LetGo


class WorkerServices:
    """For one worker process, and no longer than that. Event loop's thread only."""

    def __init__(self, model_name: str, context: BackendContext, connection: Connection) -> None:
        self._model_name = model_name
        self._context = context
        self._connection = connection
        self._calls = ModelCalls(context.models, connection)
        self._metrics = ModelMetrics(context.custom_metrics)
        self._changes: set[asyncio.Task[None]] = set()
        self.is_loading = True
        """Whether the model is still being initialized."""

    def take(self, message: Asking) -> None:
        match message:
            case Call():
                self._calls.begin(message)
            case EndCall(number):
                self._calls.end(number)
            case LetGo(numbers):
                self._metrics.let_go(numbers)
            case Ask():
                self._answer(message)

    def _answer(self, ask: Ask) -> None:
        match ask.question:
            case LoadModel() | UnloadModel() as question:
                self._begin_change(ask.number, question)
                return
            case AskReady(name, version):
                answer = Answered(ask.number, self._is_ready(name, version))
            case MakeFamily() | MakeMetric() | UseMetric() as question:
                answer = self._of_metrics(ask.number, question)
        self._connection.send(answer)

    def _is_ready(self, name: str, version: int) -> bool:
        try:
            return self._context.models.find(name, version).is_ready
        except SluiceError:
            return False

    def _of_metrics(self, number: int, question: MakeFamily | MakeMetric | UseMetric) -> Answered:
        try:
            return Answered(number, self._metrics.answer(question))
        except SluiceError as error:
            return Answered(number, error=wire_error(error))

    def _begin_change(self, number: int, question: LoadModel | UnloadModel) -> None:
        task = asyncio.get_running_loop().create_task(self._change(number, question))
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)

    async def _change(self, number: int, question: LoadModel | UnloadModel) -> None:
        answer = Answered(number)
        try:
            await self._change_repository(question)
        except SluiceError as error:
            answer = Answered(number, error=wire_error(error))
        except Exception as error:
            log.exception("the request of a model for '%s' failed", question.name)
            answer = Answered(number, error=wire_error(SluiceError(ErrorCode.INTERNAL, f"internal error: {error}")))
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


def refuse(message: Asking, connection: Connection, reason: str) -> None:
    """Answer who may not ask."""
    error = wire_error(SluiceError(ErrorCode.UNIMPLEMENTED, reason))
    match message:
        case Call():
            connection.send(Called(Reply(message.request.number, True, error=error)))
        case Ask(number):
            connection.send(Answered(number, error=error))
