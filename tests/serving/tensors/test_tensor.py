"""A tensor in its two forms."""

import ml_dtypes
import numpy as np
import pytest

from sluice.serving.tensors import byte_strings
from sluice.serving.tensors.datatypes import DATA_TYPES, of_config, of_numpy
from sluice.serving.tensors.tensor import Tensor

SAMPLES = {
    "BOOL": [True, False],
    "FP16": [0.5, -2.0],
    "FP32": [1.5, float("inf")],
    "FP64": [0.1, -0.0],
    "BF16": [1.0, 3.140625],
    "BYTES": [b"\xff\x00", b""],
    **{name: [1, 2] for name in ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64")},
}


def array_of(name: str) -> "np.ndarray[tuple[int, ...], np.dtype[np.generic]]":
    return np.array(SAMPLES[name], DATA_TYPES[name].dtype).reshape(1, 2)


@pytest.mark.parametrize("name", DATA_TYPES)
def test_wire_bytes_and_array_are_one_value(name: str) -> None:
    array = array_of(name)
    sent = Tensor.of("x", array)
    received = Tensor("x", name, (1, 2), raw=bytes(sent.raw))
    received.check_size()
    assert sent.datatype == name
    assert received.array.dtype == array.dtype
    assert received.array.tolist() == array.tolist()
    assert received.size_bytes == sent.size_bytes == len(bytes(sent.raw))


def test_bytes_carry_their_lengths() -> None:
    assert bytes(Tensor.of("x", np.array([b"ab", b""], object)).raw) == b"\x02\0\0\0ab\0\0\0\0"


def test_text_is_sent_as_utf_8() -> None:
    assert Tensor.of("x", np.array(["é"])).raw == b"\x02\0\0\0\xc3\xa9"


@pytest.mark.parametrize(
    ("datatype", "shape", "raw"),
    [
        ("INT32", (2,), b"\0" * 7),
        ("INT32", (2,), b"\0" * 12),
        ("BYTES", (1,), b"\x02\0\0\0a"),
        ("BYTES", (1,), b"\x02\0"),
        ("BYTES", (2,), b"\0\0\0\0"),
    ],
)
def test_bytes_that_do_not_fit_are_noticed(datatype: str, shape: tuple[int, ...], raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|elements"):
        Tensor("x", datatype, shape, raw=raw).check_size()


def test_an_array_in_another_order_is_sent_in_rows() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    assert np.frombuffer(Tensor.of("x", array).raw, np.int32).tolist() == [0, 3, 1, 4, 2, 5]


def test_other_names_and_shapes_share_the_value() -> None:
    array = np.arange(6, dtype=np.float32)
    reshaped = Tensor.of("x", array).renamed("y").reshaped((2, 3))
    assert (reshaped.name, reshaped.shape) == ("y", (2, 3))
    assert np.shares_memory(reshaped.array, array)
    packed = Tensor("x", "BYTES", (2,), raw=b"\0\0\0\0\0\0\0\0").reshaped((1, 2))
    assert packed.array.shape == (1, 2)


def test_types_have_names_in_three_languages() -> None:
    assert of_config("TYPE_STRING") is DATA_TYPES["BYTES"]
    assert of_config("TYPE_NOPE") is None
    assert of_numpy(np.dtype(ml_dtypes.bfloat16)) is DATA_TYPES["BF16"]
    assert of_numpy(np.dtype(">i4")) is DATA_TYPES["INT32"]
    with pytest.raises(ValueError, match="complex64"):
        Tensor.of("x", np.zeros(1, np.complex64))


@pytest.mark.parametrize("size", [0, 3, byte_strings._LONG_BYTES])
@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_long_and_short_strings_are_read_alike(size: int, form: type[memoryview]) -> None:
    elements = [b"a" * size, b"", b"bc"]
    tensor = Tensor("x", "BYTES", (3,), form(byte_strings.pack(elements)))
    tensor.check_size()
    assert list(tensor.strings()) == elements
    assert tensor.array.tolist() == elements
