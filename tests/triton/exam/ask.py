"""Short ways to write a question."""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tests.triton.records import Exchange, Json
from tests.triton.wire import base64_text

Headers = Sequence[tuple[str, str]]
Body = bytes | str | Mapping[str, Any] | list[Any] | None

JSON_TYPE = ("Content-Type", "application/json")


def encode(body: Body) -> bytes:
    if isinstance(body, bytes):
        return body
    if body is None:
        return b""
    return (body if isinstance(body, str) else json.dumps(body)).encode()


def http(
    name: str, method: str, path: str, body: Body = None, headers: Headers = (), *, status_only: bool = False
) -> Exchange:
    request: Json = {"method": method, "path": path, "headers": [list(header) for header in headers]}
    if body is not None:
        request["body_b64"] = base64_text(encode(body))
    return Exchange(f"http/{name}", "http", request, status_only=status_only)


def get(name: str, path: str) -> Exchange:
    return http(name, "GET", path)


def post(
    name: str, path: str, body: Body = "", headers: Headers = (JSON_TYPE,), *, status_only: bool = False
) -> Exchange:
    return http(name, "POST", path, body, headers, status_only=status_only)


def infer(name: str, model: str, body: Body, headers: Headers = (JSON_TYPE,)) -> Exchange:
    """`model` may carry a version: `versioned/versions/2`."""
    return post(name, f"/v2/models/{model}/infer", body, headers)


def grpc(
    name: str,
    rpc: str,
    request: Any = None,
    metadata: Iterable[tuple[str, str]] = (),
    *,
    status_only: bool = False,
) -> Exchange:
    return Exchange(f"grpc/{name}", "grpc", request or {}, rpc, tuple(metadata), status_only)


def local(name: str, action: str, **details: Any) -> Exchange:
    return Exchange(f"local/{name}", "local", {"action": action, **details})


def pause(name: str, seconds: float) -> Exchange:
    return local(name, "sleep", seconds=seconds)


def tensor(name: str, datatype: str, shape: Any, data: Any = None, **members: Any) -> Json:
    described: Json = {"name": name, "shape": shape, "datatype": datatype}
    return described | ({} if data is None else {"data": data}) | members


def inputs(*tensors: Json, **members: Any) -> Json:
    return {"inputs": list(tensors), **members}


def add_sub_inputs(rows: int = 1, **members: Any) -> Json:
    left = [float(value) for value in range(1, 4 * rows + 1)]
    right = [10 * value for value in left]
    shape = [rows, 4]
    return inputs(tensor("INPUT0", "FP32", shape, left), tensor("INPUT1", "FP32", shape, right), **members)


def int32(data: Sequence[Any], **members: Any) -> Json:
    """Return the input of identity_int32: one row."""
    return inputs(tensor("INPUT0", "INT32", [1, len(data)], data), **members)


def length_prefixed(*strings: bytes) -> bytes:
    return b"".join(struct.pack("<I", len(string)) + string for string in strings)


def binary(header: Json, data: bytes, *, header_length: object = None) -> tuple[bytes, list[tuple[str, str]]]:
    """Return a request body of JSON header and raw bytes, with its HTTP headers."""
    encoded = json.dumps(header).encode()
    length = len(encoded) if header_length is None else header_length
    content = [("Content-Type", "application/octet-stream"), ("Inference-Header-Content-Length", str(length))]
    return encoded + data, content


def binary_infer(name: str, model: str, header: Json, data: bytes, *, header_length: object = None) -> Exchange:
    body, headers = binary(header, data, header_length=header_length)
    return infer(name, model, body, headers)


def sized(name: str, datatype: str, shape: Any, size: Any, **parameters: Any) -> Json:
    return tensor(name, datatype, shape, parameters={"binary_data_size": size, **parameters})


def grpc_tensor(name: str, datatype: str, shape: Sequence[int], **members: Any) -> Json:
    return {"name": name, "datatype": datatype, "shape": [str(size) for size in shape], **members}


def request(model: str, tensors: Sequence[Json] = (), raw: Sequence[bytes] = (), **members: Any) -> Json:
    message: Json = {"model_name": model, "inputs": list(tensors), **members}
    return message | ({"raw_input_contents": [base64_text(data) for data in raw]} if raw else {})


def model_infer(
    name: str, model: str, tensors: Sequence[Json] = (), raw: Sequence[bytes] = (), **members: Any
) -> Exchange:
    return grpc(name, "ModelInfer", request(model, tensors, raw, **members))


def packed(code: str, *values: float) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)
