"""What onnxruntime says went wrong, in Triton's form."""

import re

from sluice.errors import ErrorCode, SluiceError

_FORM = re.compile(r"\[ONNXRuntimeError\] : (\d+) : \w+ : (.*)", re.DOTALL)
_INVALID_ARGUMENT = "2"


def failure_of(error: Exception) -> SluiceError:
    """INVALID where onnxruntime blames its inputs, else INTERNAL; the message is its own."""
    found = _FORM.fullmatch(str(error))
    if found is None:
        return SluiceError(ErrorCode.INTERNAL, f"onnx runtime error: {error}")
    code = ErrorCode.INVALID if found[1] == _INVALID_ARGUMENT else ErrorCode.INTERNAL
    return SluiceError(code, f"onnx runtime error {found[1]}: {found[2]}")
