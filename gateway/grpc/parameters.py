"""Parameters of requests, tensors and responses: those that the protocol knows, and those that it hands on."""

from collections.abc import Callable, Mapping
from typing import Any

from tritonclient.grpc import service_pb2

from serving.request import InferRequest, Parameter, SequenceFlag
from sluice.errors import ErrorCode, SluiceError

EMPTY_FINAL = "triton_enable_empty_final_response"
"""Asks for a message that says that a stream's request has ended, where the last response did not."""

_UINT64_MASK = 2**64 - 1
"""Triton reads these as unsigned."""
_KINDS = ("bool_param", "int64_param", "string_param", "double_param")


def read_parameters(parameters: Mapping[str, Any], request: InferRequest) -> bool:
    """Put what `parameters` say into `request`. Returns whether it wants an empty final response. Raises INVALID."""
    wants_empty_final = False
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        if name in _KNOWN:
            _KNOWN[name](request, kind, parameter)
        elif name == EMPTY_FINAL:
            wants_empty_final = _truth(name, kind, parameter)
        elif name.startswith("triton_"):
            raise _invalid(
                "parameter keys starting with 'triton_' are reserved for Triton usage. Only the following keys "
                f"starting with 'triton_' are allowed: {EMPTY_FINAL}"
            )
        else:
            request.parameters[name] = _custom(name, kind, parameter)
    return wants_empty_final


def _custom(name: str, kind: str | None, parameter: Any) -> Parameter:
    if kind not in _KINDS:
        raise _wrong_kind(name, "int64_param, bool_param, or string_param.")
    value: Parameter = getattr(parameter, kind)
    return value


def _set_sequence_id(request: InferRequest, kind: str | None, parameter: Any) -> None:
    if kind == "int64_param":
        request.correlation_id = parameter.int64_param & _UINT64_MASK
    elif kind == "string_param":
        request.correlation_id = parameter.string_param
    else:
        raise _wrong_kind("sequence_id", "int64_param or string_param.")


def _set_sequence_start(request: InferRequest, kind: str | None, parameter: Any) -> None:
    if _truth("sequence_start", kind, parameter):
        request.sequence |= SequenceFlag.START


def _set_sequence_end(request: InferRequest, kind: str | None, parameter: Any) -> None:
    if _truth("sequence_end", kind, parameter):
        request.sequence |= SequenceFlag.END


def _set_priority(request: InferRequest, kind: str | None, parameter: Any) -> None:
    if kind not in ("int64_param", "uint64_param"):
        raise _wrong_kind("priority", "int64_param or uint64_param.")
    priority: int = getattr(parameter, kind)
    if priority < 0:
        raise _invalid("invalid value for 'priority', expected value >= 0.")
    request.priority = priority


def _set_timeout(request: InferRequest, kind: str | None, parameter: Any) -> None:
    if kind != "int64_param":
        raise _wrong_kind("timeout", "int64_param.")
    request.timeout_us = parameter.int64_param & _UINT64_MASK


_KNOWN: dict[str, Callable[[InferRequest, str | None, Any], None]] = {
    "sequence_id": _set_sequence_id,
    "sequence_start": _set_sequence_start,
    "sequence_end": _set_sequence_end,
    "priority": _set_priority,
    "timeout": _set_timeout,
}


def _truth(name: str, kind: str | None, parameter: Any) -> bool:
    if kind != "bool_param":
        raise _wrong_kind(name, "bool_param.")
    value: bool = parameter.bool_param
    return value


def of_tensor(parameters: Mapping[str, Any], name: str, kind: str, tensor: str) -> Any:
    """Parameter `name` of a tensor, None where it is not there. Raises INVALID where it is not of `kind`."""
    if name not in parameters:
        return None
    parameter = parameters[name]
    if parameter.WhichOneof("parameter_choice") != kind:
        raise _invalid(f"invalid value type for '{name}' parameter for tensor '{tensor}', expected {kind}.")
    return getattr(parameter, kind)


def write_parameter(parameter: "service_pb2.InferParameter", value: Parameter) -> None:
    """Set `parameter` to `value`, in the field of its type."""
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int):
        if value > 2**63 - 1:
            parameter.uint64_param = value
        else:
            parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value


def _wrong_kind(name: str, expected: str) -> SluiceError:
    return _invalid(f"invalid value type for '{name}' parameter, expected {expected}")


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
