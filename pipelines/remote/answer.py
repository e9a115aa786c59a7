"""From a hosted LLM's events to the tensors of a response."""

from collections.abc import Sequence

import numpy as np

from pipelines.remote.generation import RemoteEvent
from serving.request import InferRequest, InferResponse
from serving.spec import ModelSpec, TensorSpec
from serving.tensors.tensor import Tensor

Row = dict[str, bytes | int]
"""One row's outputs, by name."""


def piece_row(text: str) -> Row:
    return {"text_output": text.encode()}


def end_row(event: RemoteEvent, text: str) -> Row:
    """The end of an answer; `text` is all of it, or in a stream what comes with its end."""
    assert event.finish_reason is not None
    row = piece_row(text) | {"finish_reason": event.finish_reason.value.encode()}
    if event.counts:
        row |= {"num_input_tokens": event.prompt_tokens, "num_output_tokens": event.completion_tokens}
    if event.counts_cached:
        row["num_cached_tokens"] = event.cached_tokens
    return row


def response_of(spec: ModelSpec, request: InferRequest, rows: Sequence[Row], *, is_final: bool) -> InferResponse:
    """The outputs that the model declares, the request wants and every row has, each [1] after the rows of a batch."""
    declared, wanted = spec.outputs, request.requested_outputs
    outputs = [
        _tensor(declared[name], [row[name] for row in rows], is_batched=spec.max_batch_size > 0)
        for name in rows[0]
        if name in declared and (not wanted or name in wanted) and all(name in row for row in rows)
    ]
    return InferResponse(outputs, is_final=is_final)


def _tensor(spec: TensorSpec, elements: Sequence[bytes | int], *, is_batched: bool) -> Tensor:
    array = np.array(elements, spec.data_type.dtype)
    shape = (len(elements), 1) if is_batched else (1,)
    return Tensor(spec.name, spec.data_type.name, shape, array=array.reshape(shape))
