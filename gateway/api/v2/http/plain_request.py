"""The infer requests that most clients send, parsed into types: in a third of the time of looking at each member.

Whatever is not of these types is left to `infer_request.py`, which knows every member and Triton's words for every
fault.
"""

from typing import Annotated, Any

import msgspec

from sluice.gateway.api.v2.http.infer_request import PROTOCOL, BinaryData, count_elements
from sluice.gateway.api.v2.http.json_document import MAX_INT64
from sluice.gateway.api.v2.http.tensor_json import parse_tensor
from sluice.gateway.api.v2.infer import AS_BINARY, AS_JSON, OutputPlan, V2Request
from sluice.serving.model import Model
from sluice.serving.request import InferRequest
from sluice.serving.tensors.datatypes import DATA_TYPES
from sluice.serving.tensors.tensor import Tensor

_Unsigned = Annotated[int, msgspec.Meta(ge=0, le=MAX_INT64)]


class _InputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    binary_data_size: _Unsigned


class _Input(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    shape: tuple[_Unsigned, ...]
    datatype: str
    data: list[Any] | msgspec.UnsetType = msgspec.UNSET
    parameters: _InputParameters | msgspec.UnsetType = msgspec.UNSET


class _OutputParameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    binary_data: bool = False


class _Output(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    name: str
    parameters: _OutputParameters = _OutputParameters()


class _Parameters(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    binary_data_output: bool = False


class _Document(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    inputs: list[_Input]
    id: str = ""
    outputs: list[_Output] = []
    parameters: _Parameters = _Parameters()


_decode = msgspec.json.Decoder(_Document).decode


def parse_plain_request(body: bytes | bytearray, json_length: int, model: Model) -> V2Request | None:
    """Return the request to `model`; None for one that has other members, or that may be at fault.

    Raises SluiceError for some faults, in the same words as `parse_infer_request`.
    """
    is_json = json_length == len(body)
    try:
        document = _decode(body if is_json else memoryview(body)[:json_length])
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None
    binary_data = None if is_json else BinaryData(memoryview(body)[json_length:], model.name)
    inputs: dict[str, Tensor] = {}
    for each in document.inputs:
        tensor = _parse_input(each, binary_data)
        if tensor is None or each.name in inputs:
            return None
        inputs[each.name] = tensor
    if binary_data is not None:
        binary_data.check_used_up()
    plan = OutputPlan(AS_BINARY if document.parameters.binary_data_output else AS_JSON)
    for output in document.outputs:
        plan.named[output.name] = AS_BINARY if output.parameters.binary_data else AS_JSON
    if len(plan.named) != len(document.outputs):
        return None
    return V2Request(model, InferRequest(inputs, document.id, tuple(plan.named), protocol=PROTOCOL), plan)


def _parse_input(each: _Input, binary_data: BinaryData | None) -> Tensor | None:
    num_elements = count_elements(each.name, each.datatype, each.shape)
    if isinstance(each.parameters, _InputParameters):
        if each.data is not msgspec.UNSET or binary_data is None or each.datatype not in DATA_TYPES:
            return None
        raw = binary_data.take_copy(each.name, each.parameters.binary_data_size)
        return Tensor(each.name, each.datatype, each.shape, raw)
    if each.data is msgspec.UNSET or num_elements == 0:
        return None
    return parse_tensor(each.name, each.datatype, each.shape, each.data, num_elements)
