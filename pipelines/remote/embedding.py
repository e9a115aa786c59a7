"""An embedding model behind an API. A batch of texts is one request, and the answer has a vector for each text."""

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from copy import deepcopy
from time import perf_counter_ns

import msgspec
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.llm.services import RequestLimits
from sluice.pipelines.remote.client import ApiClient, Json, RequestDeadlines, request_deadlines
from sluice.pipelines.remote.options import RemoteOptions
from sluice.pipelines.text.tensor_model import read_text_rows
from sluice.serving.backend import BackendContext
from sluice.serving.batching.scheduled_model import ScheduledModel
from sluice.serving.instance import Instance
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from sluice.serving.spec import ModelSource, ModelSpec, build_spec
from sluice.serving.tensors.tensor import Tensor

log = logging.getLogger(__name__)

INPUT, OUTPUT = "text", "embeddings"
_MAX_BATCH_SIZE = 64
"""Default of the configuration. Hosted APIs take many times as many texts, TEI takes 32 by default."""

_NS_PER_S = 1_000_000_000

Vectors = NDArray[np.float32]
Batch = dict[InferJob, tuple[list[str], RequestDeadlines]]
"""Texts and deadlines of each job that is sent in one request."""


class _Item(msgspec.Struct, frozen=True):
    index: int
    embedding: str | list[float]


class _Answer(msgspec.Struct, frozen=True):
    data: list[_Item]


def complete_config(config: ModelConfig, options: RemoteOptions) -> ModelConfig:
    """Return `config` with tensors and batching where it declares none."""
    whole = deepcopy(config)
    if not whole.input and not whole.output:
        whole.max_batch_size = whole.max_batch_size or _MAX_BATCH_SIZE
    if not whole.input:
        whole.input.add(name=INPUT, data_type=DataType.TYPE_STRING, dims=[1])
    if not whole.output:
        whole.output.add(name=OUTPUT, data_type=DataType.TYPE_FP32, dims=[options.dimensions or -1])
    if whole.max_batch_size > 1 and not whole.WhichOneof("scheduling_choice"):
        whole.dynamic_batching.SetInParent()
    policy = whole.dynamic_batching.default_queue_policy if whole.HasField("dynamic_batching") else None
    if policy is not None and not policy.max_queue_size:
        policy.max_queue_size = options.max_queue_size
    return whole


def check_tensors(spec: ModelSpec) -> None:
    """Raise SluiceError INVALID where the model declares other tensors than those of an encoder."""
    inputs = {name: (each.data_type.name, each.dims) for name, each in spec.inputs.items()}
    outputs = {name: (each.data_type.name, len(each.dims)) for name, each in spec.outputs.items()}
    if inputs != {INPUT: ("BYTES", (1,))} or outputs != {OUTPUT: ("FP32", 1)}:
        message = (
            f"model '{spec.name}' must have the input '{INPUT}' (TYPE_STRING, dims [1]) and the output '{OUTPUT}' "
            f"(TYPE_FP32, one dimension), got {inputs} and {outputs}"
        )
        raise invalid("input", message)


class EncoderModel(ScheduledModel):
    """An embedding model whose instances share one API."""

    def __init__(self, source: ModelSource, context: BackendContext, client: ApiClient, limits: RequestLimits) -> None:
        """Take over `client`. Raises SluiceError INVALID for tensors that no encoder has."""
        check_tensors(build_spec(source.config, source.version))
        instances = [
            EmbeddingInstance(source.config, source.version, index, client, limits)
            for index in range(client.options.concurrency)
        ]
        super().__init__(source, instances, context=context)
        self._client = client

    async def close(self) -> None:
        await super().close()
        await self._client.close()


class EmbeddingInstance(Instance):
    """Sends one request to the API at a time. All instances of a model share its connections."""

    def __init__(self, config: ModelConfig, version: int, index: int, client: ApiClient, limits: RequestLimits) -> None:
        self.name = f"{config.name}_{index}"
        self._spec = build_spec(config, version)
        self._client = client
        self._limits = limits
        self._tasks: set[asyncio.Task[None]] = set()

    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        task = asyncio.create_task(self._run(jobs), name=f"embed {self.name}")
        self._tasks.add(task)

        def ended(_: object) -> None:
            self._tasks.discard(task)
            for job in jobs:
                job.fail(SluiceError(ErrorCode.CANCELLED, "the request was cancelled"))
            done()

        def cancel() -> None:
            # The answer is needed as long as one job of the batch is not cancelled.
            if all(job.is_cancelled for job in jobs):
                task.cancel()

        task.add_done_callback(ended)
        for job in jobs:
            job.on_cancel = cancel

    async def close(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _run(self, jobs: list[InferJob]) -> None:
        try:
            await self._embed(self._read(jobs))
        except Exception:
            log.exception("instance %s failed on a batch", self.name)
            error = SluiceError(ErrorCode.INTERNAL, f"{self.name} failed; the server's log has the details")
            for job in jobs:
                job.fail(error)

    def _read(self, jobs: Sequence[InferJob]) -> Batch:
        """Read each job's texts and deadlines. A job that is invalid fails alone."""
        batch = {}
        for job in jobs:
            job.infer_started_ns = perf_counter_ns()
            waited_s = (job.infer_started_ns - job.started_ns) / _NS_PER_S
            try:
                [texts] = read_text_rows(job.request, INPUT, is_batched=False)
                batch[job] = texts, request_deadlines(job.request, self._client.options, self._limits, waited_s)
            except SluiceError as error:
                job.fail(error)
        return batch

    async def _embed(self, batch: Batch) -> None:
        if not batch:
            return
        loop = asyncio.get_running_loop()
        # A job with less time than its batch ends at its own deadline.
        timers = [loop.call_at(deadlines.end, _expire, job) for job, (_, deadlines) in batch.items()]
        try:
            await self._answer(batch)
        except SluiceError as error:
            if error.code is ErrorCode.INVALID and len(batch) > 1:
                # The API may refuse the text of one job only.
                await asyncio.gather(*(self._embed_alone(job, *each) for job, each in batch.items()))
                return
            for job in batch:
                job.fail(error)
        finally:
            for timer in timers:
                timer.cancel()

    async def _embed_alone(self, job: InferJob, texts: list[str], deadlines: RequestDeadlines) -> None:
        try:
            await self._answer({job: (texts, deadlines)})
        except SluiceError as error:
            job.fail(error)

    async def _answer(self, batch: Batch) -> None:
        texts = [text for each, _ in batch.values() for text in each]
        vectors = await self._request_vectors(texts, max(deadlines.end for _, deadlines in batch.values()))
        start = 0
        for job, (own, _) in batch.items():
            job.infer_ended_ns = perf_counter_ns()
            job.respond(self._response(vectors[start : start + len(own)]))
            start += len(own)

    async def _request_vectors(self, texts: list[str], deadline: float) -> Vectors:
        """Return [len(texts), dim] float32."""
        options, errors = self._client.options, self._client.errors
        # Base64 is a quarter of the size of numbers in JSON, and needs no parsing; an API without it gives numbers.
        body: Json = {"input": texts, "encoding_format": "base64"}
        if options.dimensions:
            body["dimensions"] = options.dimensions
        answer = await self._client.ask(body, deadline)
        with errors.translated():
            vectors = _in_order(msgspec.convert(answer, _Answer).data, len(texts))
        [dim] = self._spec.outputs[OUTPUT].dims
        if dim not in (-1, vectors.shape[1]):
            declared = f"model '{self._spec.name}' declares {dim}"
            raise errors.unavailable(f"gave vectors of {vectors.shape[1]} dimensions, and {declared}")
        return vectors

    def _response(self, vectors: Vectors) -> InferResponse:
        array = vectors if self._spec.max_batch_size > 0 else vectors[0]
        return InferResponse([Tensor(OUTPUT, "FP32", array.shape, array=array)])


def _expire(job: InferJob) -> None:
    job.fail(SluiceError(ErrorCode.DEADLINE, "the request was not answered within its time limit"))


def _in_order(items: Sequence[_Item], count: int) -> Vectors:
    """Return the vectors ordered by index.

    Raises ValueError unless there is one vector of finite numbers for each text, all of one length.
    """
    if sorted(item.index for item in items) != list(range(count)):
        raise ValueError(f"{len(items)} embeddings for {count} texts, or not numbered 0 to {count - 1}")
    vectors = [_vector(item.embedding) for item in sorted(items, key=lambda item: item.index)]
    if len({len(vector) for vector in vectors}) != 1 or not len(vectors[0]):
        raise ValueError("embeddings of different lengths, or of none")
    stacked = np.stack(vectors)
    if not np.isfinite(stacked).all():
        raise ValueError("embeddings with numbers that are not finite")
    return stacked


def _vector(embedding: str | list[float]) -> Vectors:
    if isinstance(embedding, str):
        return np.frombuffer(base64.b64decode(embedding, validate=True), "<f4").astype(np.float32)
    return np.array(embedding, np.float32)
