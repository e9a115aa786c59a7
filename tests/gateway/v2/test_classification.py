from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from gateway.v2.classification import classify
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

LABELS = ("zero", "one", "two", "three")


def classes(
    values: Any, dtype: Any, count: int, labels: Sequence[str] = (), is_batched: bool = False
) -> tuple[tuple[int, ...], list[str]]:
    found = classify(Tensor.of("OUTPUT0", np.array(values, dtype)), count, labels, is_batched)
    assert (found.name, found.datatype) == ("OUTPUT0", "BYTES")
    found.check_size()
    return found.shape, [text.decode() for text in found.array.ravel().tolist()]


def test_as_the_real_server_answered() -> None:
    """Values recorded from Triton: http/class/* and grpc/class/* of the reference."""
    assert classes([[-9, -18, -27, -36]], np.float32, 2, (), True) == ((1, 2), ["-9.000000:0", "-18.000000:1"])
    assert classes([[11, 22, 33, 44]], np.float32, 2, LABELS, True) == (
        (1, 2),
        ["44.000000:3:three", "33.000000:2:two"],
    )
    assert classes([[1, 2, 3, 4], [4, 3, 2, 1]], np.float32, 3, LABELS, True) == (
        (2, 3),
        ["4.000000:3:three", "3.000000:2:two", "2.000000:1:one", "4.000000:0:zero", "3.000000:1:one", "2.000000:2:two"],
    )
    assert classes([[3, 9, 1]], np.int32, 2) == ((2,), ["9:1", "3:0"])


def test_without_a_batch_the_whole_tensor_is_one_row() -> None:
    assert classes([[3, 9], [1, 9]], np.int32, 2) == ((2,), ["9:1", "9:3"])


def test_rows_of_more_dimensions_are_flattened() -> None:
    values = np.arange(12).reshape(2, 2, 3)
    assert classes(values, np.int64, 1, (), True) == ((2, 1), ["5:5", "11:5"])


def test_more_classes_than_values_are_all_of_them() -> None:
    assert classes([3, 9, 1, 9], np.int32, 10) == ((4,), ["9:1", "9:3", "3:0", "1:2"])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint64, np.int64, np.float32, np.float64])
def test_equal_values_come_in_the_order_of_their_indices(dtype: Any) -> None:
    _, found = classes([7] * 40, dtype, 40)
    assert [int(text.split(":")[1]) for text in found] == list(range(40))


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64])
def test_the_ends_of_integers(dtype: Any) -> None:
    lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
    assert classes([lowest, highest, 1], dtype, 3)[1] == [f"{highest}:1", "1:2", f"{lowest}:0"]


def test_numbers_are_written_as_c_does() -> None:
    values = [0.1, -0.0, 1 / 3, 1e20, -1e-7, np.inf, -np.inf]
    assert classes(values, np.float32, 7)[1] == [
        "inf:5",
        "100000002004087734272.000000:3",
        "0.333333:2",
        "0.100000:0",
        "-0.000000:1",
        "-0.000000:4",
        "-inf:6",
    ]
    assert classes([0.1 + 0.2], np.float64, 1)[1] == ["0.300000:0"]


def test_nan_comes_last() -> None:
    assert classes([np.nan, 2, np.nan, 3], np.float32, 4)[1] == ["3.000000:3", "2.000000:1", "nan:0", "nan:2"]


def test_indices_without_a_label_have_none() -> None:
    assert classes([1, 2, 3], np.int32, 3, ("zero", "one"))[1] == ["3:2", "2:1:one", "1:0:zero"]


def test_nothing_to_classify() -> None:
    assert classes(np.zeros((1, 0)), np.int32, 2) == ((0,), [])
    assert classes(np.zeros((2, 0)), np.int32, 2, (), True) == ((2, 0), [])


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_types_without_an_order(datatype: str) -> None:
    with pytest.raises(SluiceError) as caught:
        classify(Tensor("OUTPUT0", datatype, (1,), raw=b"\0\0\0\0"), 1, (), False)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.message == f"class result not available for output due to unsupported type '{datatype}'"


def test_an_output_that_is_too_large_is_not_classified() -> None:
    most = np.zeros(1_000_000, np.int8)
    assert classes(most, np.int8, 1) == ((1,), ["0:0"])
    with pytest.raises(SluiceError, match="classification output tensor too large") as caught:
        classes(np.zeros(1_000_001, np.int8), np.int8, 1)
    assert caught.value.code is ErrorCode.INVALID
