"""OpenVINO's errors without the places in its source."""

import pytest

from serving.backends.openvino.session import convert_error, convert_read_error
from sluice.errors import ErrorCode

PLACES = "Exception from src/inference/src/cpp/core.cpp:84:\nCheck 'false' failed at src/report.cpp:151:\n"


def test_places_are_left_out() -> None:
    failure = convert_error(RuntimeError(f"{PLACES}Caught exception: the shape\nis wrong\n\n"), "running inference")
    assert failure.code is ErrorCode.INTERNAL
    assert failure.message == "openvino error in running inference : the shape is wrong"


@pytest.mark.parametrize(
    "summary", ["No conversion rule found for operations: A, B\nTo facilitate …", "Conversion is failed for: A, B\n"]
)
def test_operations_that_cannot_be_converted_are_named(summary: str) -> None:
    failure = convert_read_error(RuntimeError(f"{PLACES}Model wasn't fully converted.\nSummary:\n-- {summary}"))
    assert failure.code is ErrorCode.UNIMPLEMENTED
    assert failure.message == "OpenVINO cannot convert these operations of the model: A, B"


def test_a_file_that_cannot_be_read() -> None:
    failure = convert_read_error(RuntimeError(f"{PLACES}Unable to read the model"))
    assert failure.message == "openvino error in reading model : Unable to read the model"
