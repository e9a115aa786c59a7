"""Members of the wrong type, in every request of the extensions; and numbers beyond what a request can mean."""

from itertools import product
from typing import Any

import pytest

from tests.gateway.http.v2.small_server import SmallServer

INFER = "/v2/models/identity/infer"
VALUES: dict[str, Any] = {
    "string": "yes",
    "number": 1.5,
    "negative": -1,
    "boolean": True,
    "array": [1],
    "object": {"a": 1},
    "null": None,
    "huge": 2**64,
}
REGION = "/v2/systemsharedmemory/region/r/register"
CUDA = "/v2/cudasharedmemory/region/r/register"
WHOLE_REGION = {"key": "/x", "offset": 0, "byte_size": 4}
WHOLE_CUDA = {"raw_handle": {"b64": "AAAA"}, "byte_size": 4, "device_id": 0}
LOAD = "/v2/repository/models/m/load"
MANY_PARAMETERS = b"".join(b', "p%d": 1' % number for number in range(100))
# Path, the rest of the body, the member (of `parameters` for a load), and the kinds of value that it may have.
MEMBERS: list[tuple[str, dict[str, Any], str, set[str]]] = [
    ("/v2/repository/index", {}, "ready", {"boolean"}),
    (LOAD, {}, "parameters", {"object"}),
    (REGION, WHOLE_REGION, "key", {"string"}),
    (REGION, WHOLE_REGION, "offset", set()),
    (REGION, WHOLE_REGION, "byte_size", set()),
    (CUDA, WHOLE_CUDA, "raw_handle", set()),
    (CUDA, WHOLE_CUDA, "byte_size", set()),
    (CUDA, WHOLE_CUDA, "device_id", set()),
    *(("/v2/logging", {}, name, {"boolean", "null"}) for name in ("log_info", "log_warning", "log_error")),
    ("/v2/logging", {}, "log_verbose_level", {"null"}),
    ("/v2/logging", {}, "log_format", {"string", "null"}),
    ("/v2/trace/setting", {}, "trace_rate", {"string", "null"}),
    ("/v2/trace/setting", {}, "trace_count", {"string", "null"}),
    ("/v2/trace/setting", {}, "log_frequency", {"string", "null"}),
    ("/v2/trace/setting", {}, "trace_level", {"null"}),
]


@pytest.mark.parametrize(("path", "rest", "name", "allowed"), MEMBERS)
def test_a_member_of_a_wrong_type_is_400_and_named(
    small: SmallServer, path: str, rest: dict[str, Any], name: str, allowed: set[str]
) -> None:
    for kind, value in VALUES.items():
        if kind not in allowed:
            response = small.post(path, rest | {name: value})
            assert response.status_code == 400, (kind, response.text)
            assert f"'{name}'" in response.json()["error"], (kind, response.text)


@pytest.mark.parametrize(("name", "kind"), [*product(("config", "file:1/model.py", "other"), VALUES)])
def test_a_parameter_of_a_load_of_a_wrong_type_is_400_and_named(small: SmallServer, name: str, kind: str) -> None:
    if kind != "string" or name == "other":
        response = small.post(LOAD, {"parameters": {name: VALUES[kind]}})
        assert (response.status_code, f"'{name}'" in response.json()["error"]) == (400, True)


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        ([2**4, 2**60 + 2], f"[16,{2**60 + 2}] causes total element count to exceed maximum size of {2**63 - 1}"),
        ([2**2, 2**60 - 1], f"byte size overflow for input 'INPUT0': element count ({2**62 - 4}) * data type size (4)"),
    ],
)
def test_a_shape_that_overflows_is_400(small: SmallServer, shape: list[int], words: str) -> None:
    body = {"inputs": [{"name": "INPUT0", "shape": shape, "datatype": "FP32", "data": [1.0]}]}
    response = small.post(INFER, body)
    assert response.status_code == 400
    assert words in response.json()["error"]


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("body", "name"),
    [
        (b'{"text_input": "a", "text_input": "b"}', "text_input"),
        (b'{"text_input": "a", "text\\u005finput": "b"}', "text_input"),
        (b'{"text_input": "a", "n": 1, "n": 2}', "n"),
        (b'{"text_input": "a", "parameters": {"n": 1, "n": 2}}', "n"),
        (b'{"text_input": "a", "id": "1", "id": "2"}', "id"),
        (b'{"text_input": "a", "n": 1, "text_input": "b", "n": 2}', "text_input"),
        (b'{"text_input": "a", "n": 1, "n": 2, "text_input": "b"}', "n"),
        (
            b'{"text_input": "a", "text_input": "b"' + b"".join(b', "p%d": 1' % i for i in range(100)) + b"}",
            "text_input",
        ),
    ],
)
def test_a_key_that_stands_twice_in_a_generate_request_is_refused(
    small: SmallServer, route: str, body: bytes, name: str
) -> None:
    response = small.client.post(f"/v2/models/text_once/{route}", content=body)
    assert response.status_code == 400
    assert f"'{name}' already exists in request" in response.json()["error"]


def test_a_key_may_stand_in_a_value_too(small: SmallServer) -> None:
    for text in (b'"text_input"', b'"\\"text_input\\": 1"', b'"\\u0041"'):
        response = small.client.post("/v2/models/text_once/generate", content=b'{"text_input": %s}' % text)
        assert response.status_code == 200
