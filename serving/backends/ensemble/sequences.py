"""The sequence that an ensemble tensor belongs to: its step's, or what the step's response says instead."""

from serving.request import InferRequest, InferResponse, Parameters, SequenceFlag
from sluice.errors import ErrorCode, SluiceError

SequenceMark = tuple[int | str, SequenceFlag]
"""A correlation id, and where in its sequence the request stands."""

_NAMES = {"sequence_id", "sequence_start", "sequence_end"}


def sequence_of(request: InferRequest) -> SequenceMark:
    return request.correlation_id, request.sequence


def sequence_after(response: InferResponse, own: SequenceMark) -> SequenceMark:
    """What the tensors of a step's response belong to; `own` is what the step ran under.

    Raises SluiceError INVALID where the parameters that say so are of wrong types.
    """
    given = response.parameters
    if not given.keys() & _NAMES:
        return own
    correlation_id = given.get("sequence_id", own[0])
    if isinstance(correlation_id, bool | float):
        message = "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        raise SluiceError(ErrorCode.INVALID, message)
    flags = SequenceFlag.NONE
    if _is_set(given, "sequence_start"):
        flags |= SequenceFlag.START
    if _is_set(given, "sequence_end"):
        flags |= SequenceFlag.END
    return correlation_id, flags


def as_parameters(sequence: SequenceMark) -> Parameters:
    """As an ensemble's response says it."""
    correlation_id, flags = sequence
    return {
        "sequence_id": correlation_id,
        "sequence_start": SequenceFlag.START in flags,
        "sequence_end": SequenceFlag.END in flags,
    }


def _is_set(parameters: Parameters, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise SluiceError(ErrorCode.INVALID, f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
    return value
