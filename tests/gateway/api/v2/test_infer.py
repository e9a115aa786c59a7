"""The recorded answers have the classes of every type: tests/gateway/api/v2/test_recorded.py."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode
from sluice.gateway.api.v2.infer import ForwardedHeaders, classify
from sluice.gateway.calls import CallLog
from sluice.gateway.tenancy.access.identity import Identity
from sluice.serving.tensors.tensor import Tensor
from tests.errors import error_of

INTEGERS = (np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64)
DIGITS = [0.1, -0.0, 1 / 3, 1e20, -1e-7, np.inf, -np.inf]


def classes(
    values: Any, dtype: Any, count: int, labels: Sequence[str] = (), is_batched: bool = False
) -> tuple[tuple[int, ...], list[str]]:
    found = classify(Tensor.of("OUTPUT0", np.array(values, dtype)), count, labels, is_batched)
    assert (found.name, found.datatype) == ("OUTPUT0", "BYTES")
    found.check_size()
    return found.shape, [text.decode() for text in found.array.ravel().tolist()]


@pytest.mark.parametrize(
    ("values", "dtype", "count", "is_batched", "shape", "expected"),
    [
        pytest.param([[3, 9], [1, 9]], np.int32, 2, False, (2,), "9:1 9:3", id="without a batch all is one row"),
        pytest.param(
            np.arange(12).reshape(2, 2, 3), np.int64, 1, True, (2, 1), "5:5 11:5", id="more dimensions are flattened"
        ),
        pytest.param([3, 9, 1, 9], np.int32, 10, False, (4,), "9:1 9:3 3:0 1:2", id="more classes than values"),
        pytest.param([1, 2, 3], np.int32, 3, False, (3,), "3:2 2:1:one 1:0:zero", id="an index without a label"),
        pytest.param(
            [np.nan, 2, np.nan, 3], np.float32, 4, False, (4,), "3.000000:3 2.000000:1 nan:0 nan:2", id="nan is last"
        ),
        pytest.param(
            DIGITS,
            *(np.float32, 7, False, (7,)),
            "inf:5 100000002004087734272.000000:3 0.333333:2 0.100000:0 -0.000000:1 -0.000000:4 -inf:6",
            id="numbers are written as C does",
        ),
        pytest.param(np.zeros((1, 0)), np.int32, 2, False, (0,), "", id="nothing"),
        pytest.param(np.zeros((2, 0)), np.int32, 2, True, (2, 0), "", id="rows of nothing"),
    ],
)
def test_classes(values: Any, dtype: Any, count: int, is_batched: bool, shape: tuple[int, ...], expected: str) -> None:
    labels = ("zero", "one") if ":one" in expected else ()
    assert classes(values, dtype, count, labels, is_batched) == (shape, expected.split())


def test_equal_values_come_in_the_order_of_their_indices_and_integers_end_where_they_do() -> None:
    for dtype in (*INTEGERS, np.float32, np.float64):
        _, found = classes([7] * 40, dtype, 40)
        assert [int(text.split(":")[1]) for text in found] == list(range(40))
    for dtype in INTEGERS:
        lowest, highest = np.iinfo(dtype).min, np.iinfo(dtype).max
        assert classes([lowest, highest, 1], dtype, 3)[1] == [f"{highest}:1", "1:2", f"{lowest}:0"]


@pytest.mark.parametrize("datatype", ["BYTES", "BOOL", "FP16", "BF16"])
def test_types_without_an_order(datatype: str) -> None:
    error = error_of(classify, Tensor("OUTPUT0", datatype, (1,), raw=b"\0\0\0\0"), 1, (), False)
    text = f"class result not available for output due to unsupported type '{datatype}'"
    assert (error.code, error.message) == (ErrorCode.INVALID, text)


def test_an_output_that_is_too_large_is_not_classified() -> None:
    assert classes(np.zeros(1_000_000, np.int8), np.int8, 1) == ((1,), ["0:0"])
    error = error_of(classes, np.zeros(1_000_001, np.int8), np.int8, 1)
    assert (error.code, error.message) == (ErrorCode.INVALID, "classification output tensor too large")


@pytest.mark.parametrize(
    ("pattern", "sent", "forwarded"),
    [
        pytest.param(
            "X-fwd-.", "x-fwd-user Also-X-FWD-A x-fwd- host", "x-fwd-user Also-X-FWD-A", id="anywhere, any case"
        ),
        pytest.param("(?-i)MY_HEADER.*", "MY_HEADER_1 my_header_2", "MY_HEADER_1", id="case counts in RE2's way"),
        pytest.param(r"\pL{2}_\C+", "my_x a_x", "my_x", id="classes of RE2"),
        pytest.param(None, "priority", "", id="no pattern"),
        pytest.param("", "priority", "", id="an empty pattern"),
        pytest.param("^x-", "sequence_id", "", id="a reserved name that does not match"),
    ],
)
def test_headers_whose_names_match(pattern: str | None, sent: str, forwarded: str) -> None:
    found = ForwardedHeaders(pattern)
    assert bool(found) is bool(pattern)
    assert found.choose([(name, "v") for name in sent.split()]) == dict.fromkeys(forwarded.split(), "v")


@pytest.mark.parametrize("name", ["sequence_id", "priority", "timeout", "headers", "binary_data_output", "triton_x"])
def test_names_with_a_meaning_of_their_own_are_refused(name: str) -> None:
    error = error_of(ForwardedHeaders(".*").choose, [("host", "h"), (name, "1")])
    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert (error.code, error.message) == (ErrorCode.INVALID, text)


async def test_a_key_of_the_server_is_not_forwarded() -> None:
    headers = [("Authorization", "Bearer key"), ("x-api-key", "key"), ("x-user", "bob")]
    assert ForwardedHeaders(".*").choose(headers) == dict(headers)
    CallLog().open("v2", "/v2/models/m/infer", "id").identity = Identity(name="ci")
    assert ForwardedHeaders(".*").choose(headers) == {"x-user": "bob"}
