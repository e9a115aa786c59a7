"""A hosted LLM as a model of the repository, with the text tensors of the local LLMs, and its answers as events."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from time import perf_counter_ns

import msgspec
import numpy as np
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.types import FinishReason
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.services import RequestLimits
from sluice.pipelines.llm.values import is_streamed, read_rows, streams_one_row
from sluice.pipelines.remote.client import ApiClient, Json, RequestDeadlines, request_deadlines
from sluice.pipelines.remote.fields import build_body, declared_inputs, estimate_prompt_tokens
from sluice.pipelines.text.stream import OpenRecord, check_complete, measure
from sluice.pipelines.text.types import TextEvent
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.request import InferRequest, InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec, build_spec
from sluice.serving.task_model import RequestTasks, count_queued, gather_all
from sluice.serving.tensors.tensor import Tensor

_REASONS = {
    "stop": FinishReason.STOP,
    "eos": FinishReason.STOP,
    "eos_token": FinishReason.STOP,
    "stop_sequence": FinishReason.STOP,
    "length": FinishReason.LENGTH,
}
_FILTERED = "content_filter"
_USAGE = {"stream_options": {"include_usage": True}}
Row = dict[str, bytes | int]
"""One row's outputs, by name."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None

    @property
    def words(self) -> str:
        """The text. A model that declines answers in the field `refusal`."""
        return self.content or self.refusal or ""


class _Choice(msgspec.Struct, frozen=True):
    """A choice of a chat's stream (`delta`), of a whole chat (`message`), or of a completion (`text`)."""

    delta: _Message | None = None
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None

    @property
    def words(self) -> str:
        message = self.delta or self.message
        return message.words if message is not None else self.text or ""


class _PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _PromptDetails | None = None


class _Answer(msgspec.Struct, frozen=True):
    """A chunk or a whole answer. The chunk with the usage has no choices, and some APIs send others without any."""

    choices: list[_Choice] = []
    usage: _Usage | None = None


class RemoteEvent(TextEvent, frozen=True, gc=False):
    """A piece of the answer, or its end. Counts are 0 until the end. The flags say whether the API gave them."""

    has_counts: bool = False
    has_cached_count: bool = False


async def generate(
    client: ApiClient, body: Json, deadline: float, *, streams: bool
) -> AsyncGenerator[RemoteEvent, None]:
    """Generate the events of a request; the last one has the finish reason. Closing the generator ends the request.

    Raises SluiceError, also in mid-answer: UNAVAILABLE where the API broke off, INVALID where its content filter did.
    """
    reader = _Reader(client)
    if not streams:
        text = reader.read(await client.ask(body, deadline))
        yield reader.end(text)
        return
    whole_body = body | _USAGE if client.options.include_usage else body
    async with aclosing(client.stream(whole_body, deadline)) as chunks:
        async for chunk in chunks:
            text = reader.read(chunk)
            if text:
                yield RemoteEvent(text, num_tokens=0, prompt_tokens=0, completion_tokens=0)
    yield reader.end()


class _Reader:
    """Reads the chunks of one answer, and keeps its finish reason and usage for the last event."""

    def __init__(self, client: ApiClient) -> None:
        self._errors = client.errors
        self._reason: str | None = None
        self._usage: _Usage | None = None
        self._num_pieces = 0

    def read(self, chunk: object) -> str:
        """Return the text of a chunk or a whole answer; "" where it has none."""
        try:
            answer = msgspec.convert(chunk, _Answer)
        except msgspec.ValidationError as error:
            raise self._errors.unreadable(error) from None
        self._usage = answer.usage or self._usage
        if not answer.choices:
            return ""
        choice = answer.choices[0]
        self._reason = choice.finish_reason or self._reason
        self._num_pieces += bool(choice.words)
        return choice.words

    def end(self, text: str = "") -> RemoteEvent:
        """Return the last event. Without the API's counts each piece counts as a token, as most APIs send them."""
        usage = self._usage or _Usage(completion_tokens=self._num_pieces)
        cached = usage.prompt_tokens_details.cached_tokens if usage.prompt_tokens_details is not None else None
        return RemoteEvent(
            text,
            num_tokens=usage.completion_tokens,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            finish_reason=self._finish_reason(),
            cached_tokens=cached or 0,
            has_counts=self._usage is not None,
            has_cached_count=cached is not None,
        )

    def _finish_reason(self) -> FinishReason:
        if self._reason is None:
            raise self._errors.unavailable("broke off before the answer was complete")
        if self._reason == _FILTERED:
            raise SluiceError(ErrorCode.INVALID, "the remote's content filter ended the answer", param="messages")
        reason = _REASONS.get(self._reason)
        if reason is None:
            raise self._errors.unavailable(f"ended the answer with '{self._reason[:40]}', which is no text's end")
        return reason


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
        streams = streams_one_row(request, self.spec, len(rows))
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
