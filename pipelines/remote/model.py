"""A hosted LLM as a model of the repository, with the text tensors of the local LLMs."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from time import perf_counter_ns

import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.llm.services import RequestLimits
from sluice.pipelines.llm.values import is_streamed, read_rows, wants_stream
from sluice.pipelines.remote.client import ApiClient, Json, RequestDeadlines, request_deadlines
from sluice.pipelines.remote.fields import build_body, declared_inputs, estimate_prompt_tokens
from sluice.pipelines.remote.generation import RemoteEvent, generate
from sluice.pipelines.text.stream import OpenRecord, check_complete, measure
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec, build_spec
from sluice.serving.task_model import RequestTasks, count_queued, gather_all
from sluice.serving.tensors.tensor import Tensor

Row = dict[str, bytes | int]
"""One row's outputs, by name."""


class RemoteLlmModel(Model):
    """Sends each row of a request to the API as a request of its own. At most `concurrency` are sent at a time.

    A request that streams gets a response for each piece, any other request gets one response.
    """

    def __init__(
        self, config: ModelConfig, version: int, client: ApiClient, open_record: OpenRecord, limits: RequestLimits
    ) -> None:
        """Take over `client`. Raises SluiceError INVALID for a configuration that no hosted LLM can follow."""
        super().__init__(config, build_spec(config, version))
        self._client = client
        self._open_record = open_record
        self._limits = limits
        self._declared = declared_inputs(self.spec, client.options)
        self._places = asyncio.Semaphore(client.options.concurrency)
        self._tasks = RequestTasks(self.spec)
        self.statistics.count_pending = partial(count_queued, self._tasks.jobs)

    def is_decoupled_for(self, request: InferRequest) -> bool:
        return is_streamed(request, self.spec)

    async def close(self) -> None:
        self._is_closing = True
        for job in list(self._tasks.jobs):
            unloaded = SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.version} is unloaded")
            job.fail(unloaded)
        await self._tasks.cancel_all()
        await self._client.close()

    def _start(self, job: InferJob) -> None:
        request = job.request
        rows = read_rows(request, self._declared, request.batch_size)
        if wants_stream(request) and not self.spec.is_decoupled:
            raise invalid("stream", f"model '{self.name}' does not stream: its transaction policy is not decoupled")
        streams = self.is_decoupled_for(request)
        if streams and len(rows) != 1:
            raise invalid("stream", f"only a request of one row can stream, this one has {len(rows)}")
        bodies = [build_body(values, self._client.options) for values in rows]
        deadlines = request_deadlines(request, self._client.options, self._limits)
        self._refuse_if_full()
        if streams:
            self._tasks.start(job, partial(self._stream, job, bodies[0], deadlines))
        else:
            self._tasks.start(job, partial(self._answer_whole, job, bodies, deadlines))

    def _refuse_if_full(self) -> None:
        options = self._client.options
        if len(self._tasks.jobs) >= options.concurrency + options.max_queue_size:
            message = (
                f"model '{self.name}' has {options.concurrency} requests at {options.host} and "
                f"{options.max_queue_size} waiting, the most of both that its configuration allows "
                "(concurrency, max_queue_size)"
            )
            raise SluiceError(ErrorCode.OVERLOADED, message)

    async def _stream(self, job: InferJob, body: Json, deadlines: RequestDeadlines) -> None:
        async with aclosing(self._events(job, body, deadlines, streams=True)) as events:
            async for event in events:
                is_final = event.finish_reason is not None
                row = _end_row(event) if is_final else _piece_row(event.text)
                if is_final:
                    job.infer_ended_ns = perf_counter_ns()
                response = _build_response(self.spec, job.request, [row], is_final=is_final)
                if response.outputs or is_final:
                    job.respond(response)

    async def _answer_whole(self, job: InferJob, bodies: Sequence[Json], deadlines: RequestDeadlines) -> None:
        rows = await gather_all([self._whole_row(job, body, deadlines) for body in bodies])
        job.infer_ended_ns = perf_counter_ns()
        job.respond(_build_response(self.spec, job.request, rows, is_final=True))

    async def _whole_row(self, job: InferJob, body: Json, deadlines: RequestDeadlines) -> Row:
        async with aclosing(self._events(job, body, deadlines, streams=False)) as events:
            [end] = [event async for event in events]
            return _end_row(end)

    async def _events(
        self, job: InferJob, body: Json, deadlines: RequestDeadlines, *, streams: bool
    ) -> AsyncGenerator[RemoteEvent, None]:
        """Generate under measurement, which includes the wait for a place."""
        with measure(self._open_record(self.name, job.request.protocol)) as record:
            async with (
                self._place(job, deadlines),
                aclosing(generate(self._client, body, deadlines.end, streams=streams)) as events,
            ):
                longest = body.get(self._client.options.length_field) or 0
                await record.admit(estimate_prompt_tokens(body), longest)
                async for event in events:
                    check_complete(event)
                    record.observe(event)
                    yield event

    @asynccontextmanager
    async def _place(self, job: InferJob, deadlines: RequestDeadlines) -> AsyncGenerator[None, None]:
        """Hold one of the places of requests to the API. Raises DEADLINE where none is free in time."""
        try:
            async with asyncio.timeout_at(deadlines.start):
                await self._places.acquire()
        except TimeoutError:
            message = f"model '{self.name}': the request waited for too long to be sent to {self._client.options.host}"
            raise SluiceError(ErrorCode.DEADLINE, message) from None
        try:
            if not job.compute_started_ns:
                job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
            yield
        finally:
            self._places.release()


def _piece_row(text: str) -> Row:
    return {"text_output": text.encode()}


def _end_row(event: RemoteEvent) -> Row:
    """Return the outputs of the last event, whose text is the whole answer or the last piece of a stream."""
    assert event.finish_reason is not None
    row = _piece_row(event.text) | {"finish_reason": event.finish_reason.value.encode()}
    if event.has_counts:
        row |= {"num_input_tokens": event.prompt_tokens, "num_output_tokens": event.completion_tokens}
    if event.has_cached_count:
        row["num_cached_tokens"] = event.cached_tokens
    return row


def _build_response(spec: ModelSpec, request: InferRequest, rows: Sequence[Row], *, is_final: bool) -> InferResponse:
    """Build a response of the outputs that are declared, requested and in every row, each [1] after a batch's rows."""
    declared, requested = spec.outputs, request.requested_outputs
    outputs = [
        _tensor(declared[name], [row[name] for row in rows], is_batched=spec.max_batch_size > 0)
        for name in rows[0]
        if name in declared and (not requested or name in requested) and all(name in row for row in rows)
    ]
    return InferResponse(outputs, is_final=is_final)


def _tensor(spec: TensorSpec, elements: Sequence[bytes | int], *, is_batched: bool) -> Tensor:
    array = np.array(elements, spec.data_type.dtype)
    shape = (len(elements), 1) if is_batched else (1,)
    return Tensor(spec.name, spec.data_type.name, shape, array=array.reshape(shape))
