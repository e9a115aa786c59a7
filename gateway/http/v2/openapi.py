"""What /docs says of a generate request, made from the declared inputs."""

from typing import Any

from gateway.http.v2.llm_model import INPUTS, Tensor

_JSON_TYPE = {"BYTES": "string", "BOOL": "boolean", "INT32": "integer", "UINT64": "integer", "FP32": "number"}


def generate_body() -> dict[str, Any]:
    """The OpenAPI entry of a generate request's body."""
    properties = {"id": {"type": "string", "description": "Comes back with every response."}}
    properties |= {tensor.name: _schema(tensor) for tensor in INPUTS}
    required = [tensor.name for tensor in INPUTS if not tensor.is_optional]
    schema = {"type": "object", "properties": properties, "required": required}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _schema(tensor: Tensor) -> dict[str, Any]:
    element = {"type": _JSON_TYPE[tensor.datatype]}
    schema: dict[str, Any] = {"type": "array", "items": element} if tensor.is_list else element
    return {**schema, "description": tensor.description}
