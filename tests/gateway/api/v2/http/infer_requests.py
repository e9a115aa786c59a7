"""Paths and bodies of infer requests to the models of `models.py`."""

from typing import Any

IDENTITY, ADD_SUB, ECHO = "/v2/models/identity/infer", "/v2/models/add_sub/infer", "/v2/models/params_echo/infer"
STRINGS, TYPES = "/v2/models/identity_bytes/infer", "/v2/models/alltypes/infer"


def one(**changes: Any) -> dict[str, Any]:
    """Infer on `identity` with one input."""
    return {"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]} | changes]}


def typed(datatype: str, *values: Any) -> dict[str, Any]:
    name = "STRING" if datatype == "BYTES" else datatype
    return {"inputs": [{"name": f"IN_{name}", "shape": [len(values)], "datatype": datatype, "data": list(values)}]}


def pair(**more: Any) -> dict[str, Any]:
    """Infer on `add_sub`."""
    inputs = [
        {"name": "INPUT0", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]},
        {"name": "INPUT1", "shape": [1, 4], "datatype": "FP32", "data": [10, 20, 30, 40]},
    ]
    return {"inputs": inputs, **more}
