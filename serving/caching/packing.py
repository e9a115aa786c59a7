"""Responses as bytes, for caches in other processes: MessagePack, tensors in the protocol's wire form."""

import msgspec

from serving.request import InferResponse, Parameter
from serving.tensors.datatypes import DATA_TYPES
from serving.tensors.tensor import Tensor


class _Output(msgspec.Struct, array_like=True):
    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: memoryview


class _Packed(msgspec.Struct, array_like=True, tag="sluice-response-1"):
    """The tag is the format's name: a change of the format takes another."""

    outputs: list[_Output]
    parameters: dict[str, Parameter]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Packed)


def pack(response: InferResponse) -> bytes:
    """A copy: what it was made from may change."""
    outputs = [_Output(each.name, each.datatype, each.shape, memoryview(each.raw)) for each in response.outputs]
    return _encoder.encode(_Packed(outputs, response.parameters))


def unpack(value: bytes) -> InferResponse | None:
    """The response whose tensors lie in `value`; None for what is none."""
    try:
        packed = _decoder.decode(value)
        return InferResponse([_tensor(each) for each in packed.outputs], packed.parameters)
    except (msgspec.MsgspecError, ValueError):
        return None


def _tensor(output: _Output) -> Tensor:
    if output.datatype not in DATA_TYPES or any(size < 0 for size in output.shape):
        raise ValueError(f"no tensor has type {output.datatype} and shape {output.shape}")
    tensor = Tensor(output.name, output.datatype, output.shape, output.raw)
    tensor.check_size()
    return tensor
