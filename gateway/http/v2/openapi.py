"""What /docs says of a generate request, made from the declared inputs."""

from typing import Any

from gateway.http.scheduling import OPENAPI_PARAMETERS
from gateway.http.v2.llm_model import INPUTS, Tensor

_JSON_TYPE = {"BYTES": "string", "BOOL": "boolean", "INT32": "integer", "UINT64": "integer", "FP32": "number"}
_PARAMETERS = {
    "priority": {"type": "integer", "description": "A request parameter: lower runs earlier; 0 as if absent."},
    "timeout": {"type": "integer", "description": "A request parameter: microseconds until an error; 0 for none."},
    "cache_salt": {"type": "string", "description": "A request parameter: prompts are shared within one salt."},
}


def generate_body() -> dict[str, Any]:
    """The OpenAPI entry of a generate request's body and headers."""
    properties = {"id": {"type": "string", "description": "Comes back with every response."}}
    properties |= {tensor.name: _schema(tensor) for tensor in INPUTS}
    properties |= _PARAMETERS
    required = [tensor.name for tensor in INPUTS if not tensor.is_optional]
    schema = {"type": "object", "properties": properties, "required": required}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"requestBody": body, "parameters": OPENAPI_PARAMETERS}


def _schema(tensor: Tensor) -> dict[str, Any]:
    element = {"type": _JSON_TYPE[tensor.datatype]}
    schema: dict[str, Any] = {"type": "array", "items": element} if tensor.is_list else element
    return {**schema, "description": tensor.description}
