"""Builds the response tensors of an LLM from what it generated."""

from collections.abc import Sequence
from struct import Struct
from typing import Any

import numpy as np

from sluice.pipelines.llm.fields import OUTPUTS
from sluice.serving.request import InferResponse
from sluice.serving.spec import ModelSpec, TensorSpec
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Array, Tensor

RowResult = dict[str, list[Any] | Array]
"""The elements of one row's outputs, by `LlmOutput.field`; [tokens, vocab_size] for logits."""

_LENGTH = Struct("<I")


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
