"""NVIDIA's `tensorrt_llm_bls`: preprocessing, token model and postprocessing as one model of texts."""

from functools import partial
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.llm.values import wants_stream
from pipelines.stages.bls_run import BlsRun, Callees
from pipelines.stages.fields import BLS
from pipelines.stages.settings import BlsSettings
from serving.backend import ModelLookup
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest
from serving.spec import build_spec
from serving.task_model import RequestTasks
from sluice.errors import ErrorCode, SluiceError, invalid


class BlsModel(Model):
    """Calls the three models by name, whatever serves them. A request that streams gets a response for each piece."""

    def __init__(self, config: ModelConfig, version: int, models: ModelLookup, settings: BlsSettings) -> None:
        super().__init__(config, build_spec(config, version))
        self._models = models
        self._settings = settings
        self._tasks = RequestTasks(self.spec)

    def is_decoupled_for(self, request: InferRequest) -> bool:
        if not self.spec.is_decoupled:
            return False
        streams = wants_stream(request)
        return request.streams_by_default if streams is None else streams

    async def close(self) -> None:
        self.retire()
        await self._tasks.cancel_all()

    def _start(self, job: InferJob) -> None:
        request = job.request
        BLS.refuse(request)
        if wants_stream(request) and not self.spec.is_decoupled:
            raise invalid("stream", f"model '{self.name}' does not stream: its transaction policy is not decoupled")
        streams = self.is_decoupled_for(request)
        if streams and request.batch_size != 1:
            raise invalid("stream", f"only a request of one row can stream, this one has {request.batch_size}")
        run = BlsRun(job, self.spec, self._callees(), streams=streams, accumulates=self._settings.accumulates)
        self._tasks.start(job, partial(self._run, job, run))

    async def _run(self, job: InferJob, run: BlsRun) -> None:
        job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
        await run.answer()

    def _callees(self) -> Callees:
        names = self._settings
        return Callees(*map(self._find, (names.preprocessing, names.token_model, names.postprocessing)))

    def _find(self, name: str) -> Model:
        try:
            return self._models.find(name)
        except SluiceError as error:
            message = f"model '{self.name}' calls '{name}', which does not serve: {error.message}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
