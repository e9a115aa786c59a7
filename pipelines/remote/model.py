"""A hosted LLM as a model of the repository: the text face of our own LLMs, answered elsewhere."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from time import perf_counter_ns

from tritonclient.grpc.model_config_pb2 import ModelConfig

from pipelines.llm.recording import recorded
from pipelines.llm.services import OpenRecord, RequestLimits
from pipelines.llm.values import read_rows, wants_stream
from pipelines.remote.answer import Row, end_row, piece_row, response_of
from pipelines.remote.asked import body_of
from pipelines.remote.fields import declared_inputs
from pipelines.remote.generation import RemoteEvent, generate
from pipelines.remote.limits import Deadlines, deadlines_of
from pipelines.remote.remote import Json, Remote
from serving.job import InferJob
from serving.model import Model
from serving.request import InferRequest
from serving.spec import build_spec
from serving.task_model import RequestTasks, count_queued, gather_all
from sluice.errors import ErrorCode, SluiceError, invalid


class RemoteLlmModel(Model):
    """Each row of a request is a request to the API, so many at a time as are allowed; the others wait in a line.

    A request that streams gets a response for each piece, any other one gets one response.
    """

    def __init__(
        self, config: ModelConfig, version: int, remote: Remote, open_record: OpenRecord, limits: RequestLimits
    ) -> None:
        """Owns `remote`. Raises SluiceError INVALID for a configuration that no hosted LLM can follow."""
        super().__init__(config, build_spec(config, version))
        self._remote = remote
        self._open_record = open_record
        self._limits = limits
        self._declared = declared_inputs(self.spec, remote.options)
        self._places = asyncio.Semaphore(remote.options.concurrency)
        self._tasks = RequestTasks(self.spec)
        self.statistics.count_pending = partial(count_queued, self._tasks.jobs)

    def is_decoupled_for(self, request: InferRequest) -> bool:
        if not self.spec.is_decoupled:
            return False
        streams = wants_stream(request)
        return request.streams_by_default if streams is None else streams

    async def close(self) -> None:
        self._is_closing = True
        for job in list(self._tasks.jobs):
            unloaded = SluiceError(ErrorCode.UNAVAILABLE, f"model '{self.name}' version {self.version} is unloaded")
            self._tasks.end(job, unloaded)
        await self._tasks.cancel_all()
        await self._remote.close()

    # -- a request's begin

    def _start(self, job: InferJob) -> None:
        request = job.request
        rows = read_rows(request, self._declared, request.batch_size)
        if wants_stream(request) and not self.spec.is_decoupled:
            raise invalid("stream", f"model '{self.name}' does not stream: its transaction policy is not decoupled")
        streams = self.is_decoupled_for(request)
        if streams and len(rows) != 1:
            raise invalid("stream", f"only a request of one row can stream, this one has {len(rows)}")
        bodies = [body_of(values, self._remote.options) for values in rows]
        deadlines = deadlines_of(request, self._remote.options, self._limits)
        self._refuse_if_full()
        if streams:
            self._tasks.start(job, partial(self._stream, job, bodies[0], deadlines))
        else:
            self._tasks.start(job, partial(self._answer_whole, job, bodies, deadlines))

    def _refuse_if_full(self) -> None:
        options = self._remote.options
        if len(self._tasks.jobs) >= options.concurrency + options.max_queue_size:
            message = (
                f"model '{self.name}' has {options.concurrency} requests at {options.host} and "
                f"{options.max_queue_size} waiting, the most of both that its configuration allows"
            )
            raise SluiceError(ErrorCode.OVERLOADED, message)

    # -- a request's task

    async def _stream(self, job: InferJob, body: Json, deadlines: Deadlines) -> None:
        async with aclosing(self._events(job, body, deadlines, streams=True)) as events:
            async for event in events:
                is_final = event.finish_reason is not None
                row = end_row(event, event.text) if is_final else piece_row(event.text)
                if is_final:
                    job.infer_ended_ns = perf_counter_ns()
                response = response_of(self.spec, job.request, [row], is_final=is_final)
                if response.outputs or is_final:
                    job.respond(response)

    async def _answer_whole(self, job: InferJob, bodies: Sequence[Json], deadlines: Deadlines) -> None:
        rows = await gather_all([self._whole_row(job, body, deadlines) for body in bodies])
        job.infer_ended_ns = perf_counter_ns()
        job.respond(response_of(self.spec, job.request, rows, is_final=True))

    async def _whole_row(self, job: InferJob, body: Json, deadlines: Deadlines) -> Row:
        async with aclosing(self._events(job, body, deadlines, streams=False)) as events:
            [end] = [event async for event in events]
            return end_row(end, end.text)

    def _events(
        self, job: InferJob, body: Json, deadlines: Deadlines, *, streams: bool
    ) -> AsyncGenerator[RemoteEvent, None]:
        """Measured from now on, the wait for a place too."""
        record = self._open_record(self.name, job.request.protocol)
        return recorded(self._asked(job, body, deadlines, streams=streams), record)

    async def _asked(
        self, job: InferJob, body: Json, deadlines: Deadlines, *, streams: bool
    ) -> AsyncGenerator[RemoteEvent, None]:
        async with (
            self._place(job, deadlines),
            aclosing(generate(self._remote, body, deadlines.end, streams=streams)) as events,
        ):
            async for event in events:
                yield event

    @asynccontextmanager
    async def _place(self, job: InferJob, deadlines: Deadlines) -> AsyncGenerator[None, None]:
        """One of those that may ask the API at a time."""
        try:
            async with asyncio.timeout_at(deadlines.start):
                await self._places.acquire()
        except TimeoutError:
            message = f"model '{self.name}': the request waited for too long to be sent to {self._remote.options.host}"
            raise SluiceError(ErrorCode.DEADLINE, message) from None
        try:
            if not job.compute_started_ns:
                job.compute_started_ns = job.infer_started_ns = perf_counter_ns()
            yield
        finally:
            self._places.release()
