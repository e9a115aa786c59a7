"""Requests and responses as the gateway has them, in the form that crosses the socket, and back."""

from typing import cast

import numpy as np

from serving.backends.python.connection import Connection
from serving.backends.python.frames import INLINE_BYTES, Reply, WireRequest, WireTensor
from serving.request import InferRequest, InferResponse, SequenceFlag
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

ERROR_CODES = {
    0: ErrorCode.UNKNOWN,
    1: ErrorCode.INTERNAL,
    2: ErrorCode.NOT_FOUND,
    3: ErrorCode.INVALID,
    4: ErrorCode.UNAVAILABLE,
    5: ErrorCode.UNIMPLEMENTED,
    6: ErrorCode.ALREADY_EXISTS,
    7: ErrorCode.CANCELLED,
}
"""By Triton's number."""
_NUMBERS = {code: number for number, code in ERROR_CODES.items()} | {
    ErrorCode.OVERLOADED: 4,
    ErrorCode.DEADLINE: 4,
}
_INTERNAL = 1


def wire_request(number: int, request: InferRequest, connection: Connection) -> WireRequest:
    """The request for that worker; its large tensors lie where it reads them."""
    return WireRequest(
        number,
        [_wire_tensor(name, tensor, connection) for name, tensor in request.inputs.items()],
        request.id,
        request.correlation_id,
        int(request.sequence),
        request.timeout_us,
        request.requested_outputs,
        request.parameters or None,
    )


def _wire_tensor(name: str, tensor: Tensor, connection: Connection) -> WireTensor:
    data_type = tensor.data_type
    if data_type is not BYTES and tensor.num_elements * data_type.itemsize > INLINE_BYTES:
        flat = np.ascontiguousarray(tensor.array, data_type.dtype).reshape(-1)
        return WireTensor(name, tensor.datatype, tensor.shape, connection.store(flat.view(np.uint8)))
    raw = tensor.raw
    if len(raw) > INLINE_BYTES:
        return WireTensor(name, tensor.datatype, tensor.shape, connection.store(np.frombuffer(raw, np.uint8)))
    return WireTensor(name, tensor.datatype, tensor.shape, cast(bytes, raw))  # any buffer is encoded alike


def response_of(reply: Reply, connection: Connection) -> InferResponse:
    """The response that a worker's reply is; large tensors are views of the worker's memory, and stay valid."""
    if reply.error is not None:
        code, message = reply.error
        return InferResponse(error=SluiceError(ERROR_CODES[code], message), is_final=reply.is_final)
    outputs = [Tensor(each.name, each.datatype, each.shape, connection.open(each.raw)) for each in reply.outputs]
    return InferResponse(outputs, reply.parameters or {}, is_final=reply.is_final)


def request_of(wire: WireRequest, connection: Connection) -> InferRequest:
    """The request that a worker's model makes to another one."""
    return InferRequest(
        {each.name: Tensor(each.name, each.datatype, each.shape, connection.open(each.raw)) for each in wire.inputs},
        wire.id,
        wire.outputs,
        wire.parameters or {},
        timeout_us=wire.timeout_us,
        correlation_id=wire.correlation_id,
        sequence=SequenceFlag(wire.flags),
    )


def reply_of(number: int, response: InferResponse, connection: Connection) -> Reply:
    """Another model's response for the worker that asked."""
    if response.error is not None:
        return Reply(number, response.is_final, error=wire_error(response.error))
    outputs = [_wire_tensor(each.name, each, connection) for each in response.outputs]
    return Reply(number, response.is_final, outputs, None, response.parameters or None)


def wire_error(error: SluiceError) -> tuple[int, str]:
    """Triton's number of its code, and its message."""
    return _NUMBERS.get(error.code, _INTERNAL), error.message
