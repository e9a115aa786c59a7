"""An embedding model behind an API: a batch of texts is one request, answered by a vector each."""

import asyncio
import base64
import logging
from collections.abc import Callable, Sequence
from time import perf_counter_ns

import msgspec
import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from pipelines.llm.services import RequestLimits
from pipelines.remote.limits import Deadlines, deadlines_of
from pipelines.remote.options import RemoteOptions
from pipelines.remote.remote import Json, Remote
from serving.instance import Instance
from serving.job import InferJob
from serving.request import InferResponse
from serving.spec import ModelSpec, build_spec
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError, invalid

log = logging.getLogger(__name__)

INPUT, OUTPUT = "text", "embeddings"
_MAX_BATCH_SIZE = 64
"""Of a configuration that leaves it out: hosted APIs take many times that, TEI takes 32 unless told otherwise."""

_NS_PER_S = 1_000_000_000

Vectors = NDArray[np.float32]


class _Item(msgspec.Struct, frozen=True):
    index: int
    embedding: str | list[float]


class _Answer(msgspec.Struct, frozen=True):
    data: list[_Item]


def completed(config: ModelConfig, options: RemoteOptions) -> ModelConfig:
    """`config` with tensors and batching, where it declares no tensors."""
    whole = ModelConfig()
    whole.CopyFrom(config)
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
    """Raises SluiceError INVALID where the configuration declares other tensors than there are."""
    inputs = {name: (each.data_type.name, each.dims) for name, each in spec.inputs.items()}
    outputs = {name: (each.data_type.name, len(each.dims)) for name, each in spec.outputs.items()}
    if inputs != {INPUT: ("BYTES", (1,))} or outputs != {OUTPUT: ("FP32", 1)}:
        message = (
            f"model '{spec.name}' must have the input '{INPUT}' (TYPE_STRING, dims [1]) and the output '{OUTPUT}' "
            f"(TYPE_FP32, one dimension), got {inputs} and {outputs}"
        )
        raise invalid("input", message)


class EmbeddingInstance(Instance):
    """One request to the API at a time; several instances share the connections."""

    def __init__(self, config: ModelConfig, version: int, index: int, remote: Remote, limits: RequestLimits) -> None:
        self.name = f"{config.name}_{index}"
        self._spec = build_spec(config, version)
        self._remote = remote
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
            # The answer is still wanted while any of the batch wants it.
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
            await self._embed(self._readable(jobs))
        except Exception:
            log.exception("instance %s failed on a batch", self.name)
            error = SluiceError(ErrorCode.INTERNAL, f"{self.name} failed; the server's log has the details")
            for job in jobs:
                job.fail(error)

    def _readable(self, jobs: Sequence[InferJob]) -> dict[InferJob, tuple[list[str], Deadlines]]:
        """Each job's texts and time. One that makes no sense ends with its error, and the others go on."""
        found = {}
        for job in jobs:
            job.infer_started_ns = perf_counter_ns()
            waited_s = (job.infer_started_ns - job.started_ns) / _NS_PER_S
            try:
                found[job] = _texts(job), deadlines_of(job.request, self._remote.options, self._limits, waited_s)
            except SluiceError as error:
                job.fail(error)
        return found

    async def _embed(self, asked: dict[InferJob, tuple[list[str], Deadlines]]) -> None:
        if not asked:
            return
        loop = asyncio.get_running_loop()
        # A job that has less time than its batch ends at its own.
        timers = [loop.call_at(deadlines.end, _expire, job) for job, (_, deadlines) in asked.items()]
        try:
            await self._answer(asked)
        except SluiceError as error:
            if error.code is ErrorCode.INVALID and len(asked) > 1:
                # It may be the text of one that the API does not take.
                await asyncio.gather(*(self._alone(job, *each) for job, each in asked.items()))
                return
            for job in asked:
                job.fail(error)
        finally:
            for timer in timers:
                timer.cancel()

    async def _alone(self, job: InferJob, texts: list[str], deadlines: Deadlines) -> None:
        try:
            await self._answer({job: (texts, deadlines)})
        except SluiceError as error:
            job.fail(error)

    async def _answer(self, asked: dict[InferJob, tuple[list[str], Deadlines]]) -> None:
        texts = [text for each, _ in asked.values() for text in each]
        vectors = await self._vectors(texts, max(deadlines.end for _, deadlines in asked.values()))
        start = 0
        for job, (own, _) in asked.items():
            job.infer_ended_ns = perf_counter_ns()
            job.respond(self._response(vectors[start : start + len(own)]))
            start += len(own)

    async def _vectors(self, texts: list[str], deadline: float) -> Vectors:
        """[len(texts), dim] float32."""
        options, failures = self._remote.options, self._remote.failures
        # Base64 is a quarter of the size of numbers in JSON, and needs no parsing; an API without it gives numbers.
        body: Json = {"input": texts, "encoding_format": "base64"}
        if options.dimensions:
            body["dimensions"] = options.dimensions
        answer = await self._remote.ask(body, deadline)
        with failures.translated():
            vectors = _in_order(msgspec.convert(answer, _Answer).data, len(texts))
        [dim] = self._spec.outputs[OUTPUT].dims
        if dim not in (-1, vectors.shape[1]):
            declared = f"model '{self._spec.name}' declares {dim}"
            raise failures.unavailable(f"gave vectors of {vectors.shape[1]} dimensions, and {declared}")
        return vectors

    def _response(self, vectors: Vectors) -> InferResponse:
        shown = vectors if self._spec.max_batch_size > 0 else vectors[0]
        return InferResponse([Tensor(OUTPUT, "FP32", shown.shape, array=shown)])


def _texts(job: InferJob) -> list[str]:
    try:
        return [element.decode() for element in job.request.inputs[INPUT].array.ravel()]
    except UnicodeDecodeError:
        raise invalid(INPUT, f"input '{INPUT}' must be text in UTF-8") from None


def _expire(job: InferJob) -> None:
    job.fail(SluiceError(ErrorCode.DEADLINE, "the request was not answered within its time limit"))


def _in_order(items: Sequence[_Item], count: int) -> Vectors:
    """By index. Raises ValueError where there is not one vector of finite numbers for each text, all of one length."""
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
