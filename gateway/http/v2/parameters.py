"""The `parameters` of a request: those that the protocol gives a meaning, and the model's own."""

from gateway.http.v2.json_document import boolean, find, has, is_signed, members, string, text, unsigned
from gateway.http.v2.outputs import AS_BINARY, AS_JSON, OutputPlan
from serving.request import InferRequest, Parameter, SequenceFlag
from sluice.errors import invalid


def read_parameters(document: object, request: InferRequest, plan: OutputPlan) -> None:
    """Put the parameters of an infer request into `request` and `plan`. Raises SluiceError."""
    if not has(document, "parameters"):
        return
    for name, value in members(find(document, "parameters"), "failed to get request params.: ").items():
        _read_one(name, value, request, plan)


def _read_one(name: str, value: object, request: InferRequest, plan: OutputPlan) -> None:
    prefix = f"Unable to parse '{name}': "
    match name:
        case "sequence_id":
            is_number = type(value) is int and value >= 0
            request.correlation_id = unsigned(value, prefix) if is_number else text(string(value, prefix), name)
        case "sequence_start":
            if boolean(value, prefix):
                request.sequence |= SequenceFlag.START
        case "sequence_end":
            if boolean(value, prefix):
                request.sequence |= SequenceFlag.END
        case "priority":
            request.priority = unsigned(value, prefix)
        case "timeout":
            request.timeout_us = unsigned(value, prefix)
        case "binary_data_output":
            plan.otherwise = AS_BINARY if boolean(value, prefix) else AS_JSON
        case _ if name.startswith("triton_"):
            raise invalid(
                name,
                "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            )
        case _:
            request.parameters[name] = custom_parameter(name, value)


def custom_parameter(name: str, value: object) -> Parameter:
    """A model's own parameter. Integers beyond 64 bits become doubles, as in Triton."""
    if isinstance(value, str):
        return text(value, text(name, "parameters"))
    if isinstance(value, bool | float):
        return value
    if type(value) is int:
        return value if is_signed(value) else float(value)
    complaint = f"parameter '{name}' has invalid type. It should be either 'int', 'bool', or 'string'."
    raise invalid(name, complaint)
