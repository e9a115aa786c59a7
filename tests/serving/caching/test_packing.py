import msgspec
import numpy as np
import pytest

from sluice.serving.caching.redis_cache import pack, unpack
from sluice.serving.request import InferResponse
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Tensor

TAG = "sluice-response-1"


def packed(*outputs: tuple[object, ...], tag: str = TAG, parameters: object = None) -> bytes:
    return msgspec.msgpack.encode([tag, outputs, {} if parameters is None else parameters])


@pytest.mark.parametrize("name", DATA_TYPES)
def test_every_type_comes_back_as_it_was(name: str) -> None:
    array = np.array([[1, 0, 1]]).astype(DATA_TYPES[name].dtype)
    if name == "BYTES":
        array[:] = [[b"a", b"", "ü".encode()]]
    found = unpack(pack(InferResponse([Tensor("Y", name, array.shape, array=array)], {"p": 1.5, "q": "x", "r": True})))
    assert found is not None
    assert found.parameters == {"p": 1.5, "q": "x", "r": True}
    (output,) = found.outputs
    assert (output.name, output.datatype, output.shape) == ("Y", name, (1, 3))
    assert np.array_equal(output.array, array)


def test_what_is_packed_is_a_copy() -> None:
    memory = bytearray(b"abc")
    value = pack(InferResponse([Tensor("Y", "UINT8", (3,), memoryview(memory))]))
    memory[:] = b"xyz"
    found = unpack(value)
    assert found is not None
    assert bytes(found.outputs[0].raw) == b"abc"


def test_every_truncation_is_no_response() -> None:
    value = pack(InferResponse([Tensor.of("Y", np.arange(4)), Tensor("Z", "BYTES", (1,), b"\1\0\0\0a")], {"p": 1}))
    assert unpack(value) is not None
    assert [length for length in range(len(value)) if unpack(value[:length]) is not None] == []


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"hello",
        b'{"outputs": []}',
        msgspec.msgpack.encode([TAG]),
        msgspec.msgpack.encode({"outputs": []}),
        packed(tag="sluice-response-0"),
        packed(("Y", "FP33", [1], b"1234")),
        packed(("Y", "FP32", [2], b"1234")),
        packed(("Y", "FP32", [-1], b"1234")),
        packed(("Y", "FP32", [1.5], b"1234")),
        packed(("Y", "BYTES", [1], b"\xff\0\0\0a")),
        packed(("Y", "FP32", [1])),
        packed(parameters={"p": [1]}),
        packed(parameters={1: "p"}),
    ],
)
def test_what_others_put_there_is_no_response(value: bytes) -> None:
    assert unpack(value) is None
