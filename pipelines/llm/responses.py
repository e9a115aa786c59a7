"""Builds the response tensors of an LLM from what it generated."""

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from pipelines.llm.fields import OUTPUTS
from pipelines.llm.parse import RowRequest
from pipelines.llm.tokens import TokenPiece
from pipelines.text.types import TextEvent
from serving.request import InferResponse
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Tensor

RowResult = dict[str, list[Any]]
"""The elements of one row's outputs, by `LlmOutput.field`."""

_LENGTH = Struct("<I")


class RowSummary:
    """Collects what the last response says about a whole row: finish reason, counts, log probabilities."""

    def __init__(self, request: RowRequest, row: int = 0) -> None:
        self._request = request
        self._row = row
        self._log_probs: list[float] = []

    def note(self, event: TextEvent) -> None:
        """Take every event of the row, in order."""
        if not self._request.returns_log_probs:
            return
        if isinstance(event, TokenPiece):
            self._log_probs += event.log_probs
        elif event.detail is not None:
            self._log_probs += [entry.logprob or 0.0 for entry in event.detail.logprobs or ()]

    def result(self, end: TextEvent) -> RowResult:
        """Return the outputs that come with the last event, besides the text or the tokens."""
        assert end.finish_reason is not None
        result: RowResult = {
            "finish_reason": [end.finish_reason.value.encode()],
            "batch_index": [self._row],
            "sequence_index": [0],
        }
        if self._request.returns_input_count:
            result["num_input_tokens"] = [end.prompt_tokens]
            result["num_cached_tokens"] = [end.cached_tokens]
        if self._request.returns_output_count:
            result["num_output_tokens"] = [end.completion_tokens]
        if self._request.returns_log_probs:
            result["cum_log_probs"] = [end.detail.total_logprob if end.detail is not None else 0.0]
            result["output_log_probs"] = self._log_probs
        return result


def token_result(token_ids: Sequence[int]) -> RowResult:
    """Return the token outputs of one row."""
    return {"output_ids": list(token_ids), "sequence_length": [len(token_ids)]}


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

    def _tensor(self, spec: TensorSpec, rows: list[list[Any]], pad: int) -> Tensor:
        width = max(map(len, rows))
        array = np.full((len(rows), width), pad if spec.data_type is not BYTES else b"", spec.data_type.dtype)
        for row, elements in zip(array, rows, strict=True):
            row[: len(elements)] = elements
        shape = self._shape(spec, width)
        return Tensor(spec.name, spec.data_type.name, shape, array=array.reshape(shape))

    def _shape(self, spec: TensorSpec, width: int) -> tuple[int, ...]:
        """Return the shape for the declared dims: [n], or [beam, n] with one beam, after the rows of a batch."""
        beams = (1,) * (len(spec.dims) - 1)
        if self._is_batched:
            return (self._num_rows, *beams, width)
        return (self._num_rows, width) if self._num_rows > 1 else (*beams, width)
