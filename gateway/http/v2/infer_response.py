"""From an InferResponse to the body of an infer answer: JSON, then the outputs that are wanted as bytes."""

import asyncio
from dataclasses import dataclass, field
from typing import NamedTuple

import orjson

from gateway.http.v2.outputs import Form, OutputPlan, OutputWish
from gateway.http.v2.tensor_json import data_json
from gateway.v2.classification import classify
from serving.model import Model
from serving.request import InferResponse
from serving.tensors.tensor import Buffer, Tensor
from sluice.errors import ErrorCode, SluiceError

_LARGE_ELEMENTS = 1 << 16
"""Elements of JSON that are written on a thread: they would hold up every other request."""


class InferAnswer(NamedTuple):
    """A body; `json_length` of it is JSON, and None says that nothing follows."""

    body: bytes
    json_length: int | None


@dataclass(slots=True)
class _Pieces:
    """An answer as it is put together."""

    outputs: list[bytes] = field(default_factory=list)
    binary: list[Buffer] = field(default_factory=list)
    has_binary: bool = False


async def infer_answer_anywhere(model: Model, response: InferResponse, plan: OutputPlan) -> InferAnswer:
    """As `infer_answer`; what takes long is done on a thread."""
    if sum(_num_printed(tensor, plan) for tensor in response.outputs) < _LARGE_ELEMENTS:
        return infer_answer(model, response, plan)
    return await asyncio.to_thread(infer_answer, model, response, plan)


def _num_printed(tensor: Tensor, plan: OutputPlan) -> int:
    return tensor.num_elements if plan.wish(tensor.name).form is Form.JSON else 0


def infer_answer(model: Model, response: InferResponse, plan: OutputPlan) -> InferAnswer:
    """The answer in the form that the client wants; outputs for shared memory are written there.

    Raises SluiceError where an output cannot be had in the form that it is wanted in.
    """
    pieces = _Pieces()
    for tensor in response.outputs:
        _add(pieces, tensor, plan.wish(tensor.name), model)
    text = b"{%s%s%s}" % (_head(model, response), b',"outputs":[', b",".join(pieces.outputs) + b"]")
    if not pieces.has_binary:
        return InferAnswer(text, None)
    return InferAnswer(b"".join((text, *pieces.binary)), len(text))


def _head(model: Model, response: InferResponse) -> bytes:
    """Triton's members before the outputs, in its order."""
    head = b'"model_name":%s,"model_version":"%d"' % (orjson.dumps(model.name), model.version)
    if response.id:
        head = b'"id":%s,%s' % (orjson.dumps(response.id), head)
    if response.parameters:
        head += b',"parameters":' + orjson.dumps(response.parameters)
    return head


def _add(pieces: _Pieces, tensor: Tensor, wish: OutputWish, model: Model) -> None:
    if wish.num_classes:
        labels = model.labels.get(tensor.name, ())
        tensor = classify(tensor, wish.num_classes, labels, is_batched=model.spec.max_batch_size > 0)
    shape = ",".join(map(str, tensor.shape))
    text = b'{"name":%s,"datatype":"%s","shape":[%s]' % (
        orjson.dumps(tensor.name),
        tensor.datatype.encode(),
        shape.encode(),
    )
    match wish.form:
        case Form.JSON:
            pieces.outputs.append(b'%s,"data":%s}' % (text, data_json(tensor)))
        case Form.BINARY:
            size_bytes = tensor.size_bytes
            pieces.outputs.append(b'%s,"parameters":{"binary_data_size":%d}}' % (text, size_bytes))
            pieces.binary.append(tensor.raw)
            pieces.has_binary |= size_bytes > 0
        case Form.SHARED_MEMORY:
            assert wish.window is not None
            _fill(wish.window, tensor)
            pieces.outputs.append(text + b"}")


def _fill(window: memoryview, tensor: Tensor) -> None:
    size_bytes = tensor.size_bytes
    if size_bytes > len(window):
        text = (
            f"shared memory size specified with the request for output '{tensor.name}' ({len(window)} bytes) should be "
            f"at least {size_bytes} bytes to hold the results"
        )
        raise SluiceError(ErrorCode.INTERNAL, text)
    window[:size_bytes] = memoryview(tensor.raw).cast("B")
