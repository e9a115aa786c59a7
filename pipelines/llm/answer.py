"""Answers a request to an LLM: its sequences are generated side by side, and their events become responses."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from struct import Struct
from time import perf_counter_ns
from typing import Any

import msgspec
import numpy as np

from sluice.engine.blocks import blocks_for
from sluice.engine.client.stream import Consumer
from sluice.engine.types import EventDetail, FinishReason, SequenceMetrics
from sluice.errors import SluiceError
from sluice.pipelines.llm.fields import OUTPUTS
from sluice.pipelines.llm.parse import RowRequest
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.tokens import TokenPiece
from sluice.pipelines.text.stream import Called, share_request
from sluice.pipelines.text.types import EncodedPrompt, TextEvent
from sluice.serving.job import InferJob
from sluice.serving.request import InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.task_model import gather_all
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Array, Tensor

RowResult = dict[str, list[Any] | Array]
"""The elements of one row's outputs, by `LlmOutput.field`; [tokens, vocab_size] for logits."""

_LENGTH = Struct("<I")
_NS_PER_S = 1_000_000_000


class ResponseBuilder:
    """Builds the responses of one request, with the outputs that the model declares and the request asks for."""

    def __init__(self, spec: ModelSpec, requested: Sequence[str], num_rows: int, pad_id: int) -> None:
        """Take the requested outputs, all where `requested` is empty. `pad_id` pads output_ids of shorter rows."""
        self._is_batched = spec.max_batch_size > 0
        self._num_rows = num_rows
        self._pad_id = pad_id
        self._outputs = [each for name, each in spec.outputs.items() if not requested or name in requested]
        text = next((each for each in self._outputs if OUTPUTS[each.name].field == "text_output"), None)
        self._text_name = text.name if text is not None else None
        self._text_shape = self._shape(text, 1) if text is not None else ()

    def text_response(self, text: str) -> InferResponse:
        """Build the response for a piece of a text that has more to come; empty where the text is not requested. Nearly
        every token takes this path, so it avoids arrays."""
        name = self._text_name
        if name is None:
            return InferResponse(is_final=False)
        raw = text.encode()
        tensor = Tensor(name, "BYTES", self._text_shape, _LENGTH.pack(len(raw)) + raw)
        return InferResponse([tensor], is_final=False)

    def token_response(self, token_ids: Sequence[int]) -> InferResponse:
        """Build the response for some token ids of a stream that has more to come; empty where there are none."""
        outputs: list[Tensor] = []
        if not token_ids:
            return InferResponse(outputs, is_final=False)
        for spec in self._outputs:
            field = OUTPUTS[spec.name].field
            if field == "output_ids":
                outputs.append(self._vector(spec, token_ids))
            elif field == "sequence_length":
                outputs.append(self._vector(spec, (len(token_ids),)))
        return InferResponse(outputs, is_final=False)

    def _vector(self, spec: TensorSpec, elements: Sequence[int]) -> Tensor:
        array = np.array(elements, spec.data_type.dtype)
        array.shape = shape = self._shape(spec, len(elements))
        return Tensor(spec.name, spec.data_type.name, shape, array=array)

    def response(self, results: Sequence[RowResult], *, is_final: bool = True) -> InferResponse:
        """Build the response with one result for each row."""
        outputs = []
        for spec in self._outputs:
            field = OUTPUTS[spec.name].field
            if field in results[0]:
                pad = self._pad_id if field == "output_ids" else 0
                outputs.append(self._tensor(spec, [result[field] for result in results], pad))
        return InferResponse(outputs, is_final=is_final)

    def _tensor(self, spec: TensorSpec, rows: list[list[Any] | Array], pad: int) -> Tensor:
        width = max(map(len, rows))
        inner = rows[0].shape[1:] if isinstance(rows[0], np.ndarray) else ()
        array = np.full((len(rows), width, *inner), pad if spec.data_type is not BYTES else b"", spec.data_type.dtype)
        for row, elements in zip(array, rows, strict=True):
            row[: len(elements)] = elements
        shape = self._shape(spec, width, inner)
        return Tensor(spec.name, spec.data_type.name, shape, array=array.reshape(shape))

    def _shape(self, spec: TensorSpec, width: int, inner: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the shape for the declared dims: [n], or [beam, n] with one beam, after the rows of a batch. `inner`
        are the dims of each of the n elements."""
        beams = (1,) * (len(spec.dims) - 1 - len(inner))
        if self._is_batched:
            return (self._num_rows, *beams, width, *inner)
        return (self._num_rows, width, *inner) if self._num_rows > 1 else (*beams, width, *inner)


class LlmAnswer:
    """The answer to one job: one response for all rows, or where it is split responses of each sequence's own. A
    stream has one for each piece."""

    def __init__(
        self,
        job: InferJob,
        rows: Sequence[RowRequest],
        text: LlmText,
        builder: ResponseBuilder,
        *,
        streams: bool,
        is_split: bool,
    ) -> None:
        """Take a builder of responses with one row where the answer is split, else with all of them."""
        self._job = job
        self._text = text
        self._builder = builder
        self._streams = streams
        self._is_split = is_split
        self._rows = [
            [
                SequenceAnswer(each, text, job.started_ns, number, row, len(rows))
                for number, each in enumerate(request.split_sequences())
            ]
            for row, request in enumerate(rows)
        ]
        self._sequences = [each for row in self._rows for each in row]

    async def run(self) -> None:
        """Generate and respond. Raises SluiceError."""
        for row in self._rows:
            if len(row) > 1 or row[0].needs_prompt_tokens:
                await self._share_prompt(row)
        with share_request(len(self._rows), len(self._sequences)) as begin:
            places = ((row, each) for row, sequences in enumerate(self._rows) for each in sequences)
            try:
                await gather_all([self._generate(each, partial(begin, row)) for row, each in places])
            except SluiceError as error:
                error.rename({"max_tokens": self._sequences[0].row.max_tokens_name})
                raise
        if not self._is_split:
            self._respond_whole()

    async def _share_prompt(self, sequences: list["SequenceAnswer"]) -> None:
        """Tokenize the prompt of a row's sequences once."""
        if not sequences[0].row.is_tokens:
            prompt = await self._text.prepare_shared(sequences[0].row.request.prompt)
            for each in sequences:
                each.row = replace(each.row, request=msgspec.structs.replace(each.row.request, prompt=prompt))

    def stop(self) -> None:
        """End the job with what there is, as TensorRT-LLM ends a request that another one stops."""
        for sequence in self._sequences:
            if not sequence.is_ended:
                sequence.is_ended = True
                if self._is_split:
                    self._respond_last(sequence)
        if not self._is_split:
            self._respond_whole()

    async def _generate(self, sequence: "SequenceAnswer", begin: Callable[[], object]) -> None:
        begin()
        await sequence.generate(Called(partial(self._take, sequence)))
        sequence.is_ended = True
        if self._is_split:
            self._respond_last(sequence)

    def _take(self, sequence: "SequenceAnswer", event: TextEvent) -> None:
        """Respond with an event of a sequence, or keep it for a later response."""
        if not self._job.compute_started_ns:
            # A request counts as queued until its first token: only the engine sees its prefill.
            self._job.compute_started_ns = self._job.infer_started_ns = perf_counter_ns()
        if self._streams and event.finish_reason is None and sequence.is_plain:
            response = self._piece(event)
        else:
            sequence.add(event)
            if event.finish_reason is not None or not self._streams or not sequence.has_output:
                return
            response = self._builder.response([sequence.take()], is_final=False)
        if response.outputs:
            self._job.respond(response)

    def _piece(self, event: TextEvent) -> InferResponse:
        """Build the response for a piece that carries nothing else, which nearly every token's is."""
        if isinstance(event, TokenPiece):
            return self._builder.token_response(event.token_ids)
        return self._builder.text_response(event.text) if event.text else InferResponse(is_final=False)

    def _respond_last(self, sequence: "SequenceAnswer") -> None:
        is_final = all(each.is_ended for each in self._sequences)
        if is_final:
            self._job.infer_ended_ns = perf_counter_ns()
        result = sequence.take() if self._streams else sequence.take_whole()
        self._job.respond(self._builder.response([result | sequence.summary()], is_final=is_final))

    def _respond_whole(self) -> None:
        self._job.infer_ended_ns = perf_counter_ns()
        self._job.respond(self._builder.response([each.take_whole() | each.summary() for each in self._sequences]))


class SequenceAnswer:
    """One sequence of an answer, and what its events have brought that no response has carried yet."""

    def __init__(
        self, row: RowRequest, text: LlmText, arrived_ns: int, number: int, row_index: int, num_rows: int
    ) -> None:
        """`number` is its place among the sequences of its row."""
        self.row = row
        self.is_ended = False
        self._text = text
        self._arrived_ns = arrived_ns
        self._places: RowResult = {"batch_index": [row_index]} if num_rows > 1 else {}
        if row.num_sequences > 1:
            self._places["sequence_index"] = [number]
        self._detokenizer = text.tokenizer.detokenizer() if row.is_tokens and row.gives_text else None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._log_probs: list[float] = []
        self._context_logits = self._generation_logits = b""
        self._metrics = SequenceMetrics(0.0)
        self._first_ns = self._last_ns = 0
        self._last: TextEvent | None = None

    @property
    def is_plain(self) -> bool:
        """Whether pieces of a stream are a text or token ids alone."""
        row = self.row
        return not (self._places or row.gives_both or row.needs_details or row.returns_log_probs)

    @property
    def needs_prompt_tokens(self) -> bool:
        """Whether the answer begins with the ids of a prompt that is a text."""
        return bool(self.row.gives_tokens and not self.row.is_tokens and self.row.prompt)

    @property
    def has_output(self) -> bool:
        return bool(self._token_ids or any(self._texts))

    async def generate(self, consumer: Consumer[TextEvent]) -> None:
        row = self.row
        observe = self._observe if row.needs_details else None
        if row.is_tokens:
            await self._text.generate_tokens(row.request, consumer, row.stop, row.bad, observe)
        else:
            await self._text.generate(row.request, consumer, on_detail=observe)

    def _observe(self, detail: EventDetail) -> None:
        self._metrics = detail.metrics or self._metrics
        self._context_logits += detail.context_logits or b""
        self._generation_logits += detail.generation_logits or b""

    def add(self, event: TextEvent) -> None:
        """Take an event that no response carries as it is."""
        self._last, self._last_ns = event, perf_counter_ns()
        self._first_ns = self._first_ns or self._last_ns
        if isinstance(event, TokenPiece):
            self._token_ids += event.token_ids
            self._log_probs += event.log_probs
            if self._detokenizer is not None:
                self._texts.append(self._detokenizer.feed(event.token_ids))
                if event.finish_reason is not None:
                    self._texts.append(self._detokenizer.flush())
            return
        self._texts.append(event.text)
        if event.detail is not None:
            for entry in event.detail.logprobs or ():
                self._token_ids.append(entry.token.token_id)
                self._log_probs.append(entry.logprob or 0.0)

    def take_whole(self) -> RowResult:
        """Return all that came, after the prompt where the output is to begin with it."""
        prompt = self.row.prompt
        if prompt:
            sent, tokenizer = self.row.request.prompt, self._text.tokenizer
            if isinstance(prompt, str):
                self._texts.insert(0, prompt)
                self._token_ids[:0] = sent.token_ids if isinstance(sent, EncodedPrompt) else []
            else:
                self._token_ids[:0] = prompt
                if self.row.gives_text:
                    self._texts.insert(0, tokenizer.decode(prompt, skip_special_tokens=True))
        return self.take()

    def take(self) -> RowResult:
        """Return what came since the last time."""
        row, result = self.row, dict(self._places)
        if row.gives_text:
            result["text_output"] = ["".join(self._texts).encode()]
        if row.gives_tokens:
            result |= {"output_ids": self._token_ids, "sequence_length": [len(self._token_ids)]}
        # TensorRT-LLM's token model gives them with each response.
        if row.returns_log_probs and (row.is_tokens or self.is_ended):
            detail = self._last.detail if self._last is not None else None
            result["cum_log_probs"] = [detail.total_logprob if detail is not None else 0.0]
            result["output_log_probs"] = self._log_probs
            self._log_probs = []
        if row.request.returns_metrics and self._last is not None:
            result |= self._metric_outputs(self._last)
        vocab_size = self._text.info.vocab_size
        if self._generation_logits:
            result["generation_logits"] = np.frombuffer(self._generation_logits, np.float32).reshape(-1, vocab_size)
            self._generation_logits = b""
        # With the end alone: NVIDIA's client keeps those of the last response.
        if self._context_logits and self.is_ended:
            result["context_logits"] = np.frombuffer(self._context_logits, np.float32).reshape(-1, vocab_size)
        self._texts, self._token_ids = [], []
        return result

    def _metric_outputs(self, event: TextEvent) -> RowResult:
        """Return TensorRT-LLM's metrics of a request. Times are those of a clock that only grows, as there."""
        block_size, metrics = self._text.info.block_size, self._metrics
        num_reused = event.cached_tokens // block_size
        num_prompt = blocks_for(event.prompt_tokens, block_size)
        num_blocks = blocks_for(event.prompt_tokens + max(event.completion_tokens - 1, 0), block_size)
        return {
            "kv_cache_alloc_new_blocks": [num_blocks - num_reused],
            "kv_cache_reused_blocks": [num_reused],
            "kv_cache_alloc_total_blocks": [num_blocks],
            "kv_cache_missed_block": [num_prompt - num_reused],
            "kv_cache_hit_rate": [num_reused / num_prompt if num_prompt else 0.0],
            "arrival_time_ns": [self._arrived_ns],
            "first_scheduled_time_ns": [self._arrived_ns + round(metrics.queue_s * _NS_PER_S)],
            "first_token_time_ns": [self._first_ns],
            "last_token_time_ns": [self._last_ns],
            "acceptance_rate": [metrics.num_accepted / metrics.num_drafted if metrics.num_drafted else 0.0],
            "total_accepted_draft_tokens": [metrics.num_accepted],
            "total_draft_tokens": [metrics.num_drafted],
        }

    def summary(self) -> RowResult:
        """Return the outputs that come with the end alone."""
        event = self._last
        reason = event.finish_reason if event is not None else None
        result: RowResult = {"finish_reason": [(reason or FinishReason.CANCELLED).value.encode()]}
        if self.row.returns_stop_reason:
            result["stop_reason"] = [str(event.stop_reason if event is not None else None).encode()]
        if self.row.returns_input_count:
            result["num_input_tokens"] = [event.prompt_tokens if event is not None else 0]
            result["num_cached_tokens"] = [event.cached_tokens if event is not None else 0]
        if self.row.returns_output_count:
            result["num_output_tokens"] = [event.completion_tokens if event is not None else 0]
        return result
