"""Routes beside inference, where Sluice goes on from the real Triton.

All else is in the recorded answers: tests/gateway/api/v2/test_recorded.py.
"""

import base64
import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sluice.gateway.api.v2.server import PROTOCOL_VERSION
from sluice.gateway.api.v2.trace_settings import TraceSettings
from sluice.gateway.front.http.openapi import v2_paths
from sluice.serving.backend import LoadOverrides
from tests.gateway.api.v2.http.models import IDENTITY, STRINGS, all_models, one
from tests.gateway.api.v2.http.small_server import SmallServer, small_server
from tests.gateway.api.v2.small_service import SmallService

MODEL = "/v2/models/versioned"
INDEX, LOAD, UNLOAD = "/v2/repository/index", "/v2/repository/models/m/load", "/v2/repository/models/m/unload"
TRACE, LOG = "/v2/trace/setting", "/v2/logging"
SYSTEM, CUDA = "/v2/systemsharedmemory", "/v2/cudasharedmemory"
REGION = f"{SYSTEM}/region/r/register"
FILE = {"file:1/model.py": base64.b64encode(b"\0x").decode()}


@pytest.fixture(scope="module")
def small() -> Iterator[SmallServer]:
    """One server: only inference can be answered without the application."""
    with small_server(SmallService(*all_models()), forwarded="x-fwd-.*") as running:
        yield running


# --- the server ---


@pytest.mark.parametrize("path", ["/v2/health/live", "/v2/health/ready"])
def test_health(small: SmallServer, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (small.get(path).status_code, small.get(path).content) == (200, b"")
    monkeypatch.setattr(small.service.health, "is_live", bool)
    monkeypatch.setattr(small.service.health, "is_ready", bool)
    assert small.get(path).status_code == 400


def test_metadata_config_and_statistics(small: SmallServer) -> None:
    assert (small.get("/v2").json()["name"], small.get("/v2").json()["version"]) == ("triton", PROTOCOL_VERSION)
    assert small.get(f"{MODEL}/versions/2/config").json()["version_policy"] == {"specific": {"versions": [1, 2]}}
    [before] = small.get(f"{MODEL}/versions/1/stats").json()["model_stats"]
    small.post(f"{MODEL}/versions/1/infer", one(shape=[1], datatype="INT32", data=[1]))
    [row] = small.get(f"{MODEL}/versions/1/stats").json()["model_stats"]
    assert (row["name"], row["version"], row["inference_count"]) == ("versioned", "1", before["inference_count"] + 1)
    assert len(small.get(f"{MODEL}/stats").json()["model_stats"]) == 2
    assert len(small.get("/v2/models/stats").json()["model_stats"]) == len(small.service.repository.models())


NOT_FOUND = [
    ("GET", "/v2/models"),
    ("GET", "/v2/nosharedmemory/status"),
    ("GET", f"{SYSTEM}/region/x/nope"),
    ("GET", f"{MODEL}/versions/1/trace/setting"),
    ("POST", "/v2/repository/models//load"),
]
NOT_ALLOWED = [("GET", INDEX), ("POST", f"{SYSTEM}/status"), ("GET", f"{SYSTEM}/unregister"), ("POST", MODEL)]


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        *((method, path, 404, "Not Found") for method, path in NOT_FOUND),
        *((method, path, 405, "Method Not Allowed") for method, path in NOT_ALLOWED),
        ("GET", f"{MODEL}/versions/9/stats", 400, "requested model version is not available for model 'versioned'"),
    ],
)
def test_what_is_not_there(small: SmallServer, method: str, path: str, status: int, error: str) -> None:
    response = small.client.request(method, path)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert response.headers["content-type"] == "application/json"


def test_a_version_too_long_for_any_number(small: SmallServer) -> None:
    assert small.get(f"{MODEL}/versions/{'9' * 5000}").status_code == 400


def test_every_described_path_is_there(small: SmallServer) -> None:
    for path, operations in v2_paths().items():
        asked = re.sub(r"\{(model|region)\}", "nope", path)
        for method, operation in operations.items():
            error = small.client.request(method.upper(), asked).text
            assert "Not Found" not in error and "Method Not Allowed" not in error, (method, path)
            declared = {each["name"] for each in operation["parameters"] if each["in"] == "path"}
            assert declared == set(re.findall(r"\{(\w+)\}", path)) and operation["summary"]
        assert small.client.request("PATCH", asked).status_code == 405, path


# --- the repository ---


@pytest.mark.parametrize("path", [INDEX, "/v2/repository/any/index"])
def test_the_index(small: SmallServer, path: str) -> None:
    rows = small.post(path).json()
    assert {"name": "identity", "version": "1", "state": "READY"} in rows
    broken = {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "it is broken"}
    assert rows[-2:] == [broken, {"name": "on_demand"}]
    assert small.post(path, {"ready": False}).json() == rows
    assert small.post(path, {"ready": True}).json() == rows[:-2]


@pytest.mark.parametrize(
    ("path", "body", "call"),
    [
        (LOAD, None, ("load", "m", None)),
        (LOAD, {}, ("load", "m", None)),
        (LOAD, {"parameters": {}}, ("load", "m", None)),
        (LOAD, {"parameters": {"config": "{}"}}, ("load", "m", LoadOverrides("{}"))),
        (LOAD, {"parameters": {"config": "{}"} | FILE}, ("load", "m", LoadOverrides("{}", (("1/model.py", b"\0x"),)))),
        (LOAD, {"parameters": {"lora_path": "/a", "base_model_name": "l"}}, ("load_adapter", "m", "/a", "l", True)),
        (UNLOAD, None, ("unload", "m", False)),
        (UNLOAD, {"parameters": {"unload_dependents": True}}, ("unload", "m", True)),
        (UNLOAD, {"parameters": {"unload_dependents": 5}}, ("unload", "m", False)),
        (UNLOAD, {"parameters": 5}, ("unload", "m", False)),
        (UNLOAD, b"{", ("unload", "m", False)),
    ],
)
def test_loading_and_unloading(small: SmallServer, path: str, body: Any, call: tuple[object, ...]) -> None:
    response = small.post(path, body)
    assert (response.status_code, response.content) == (200, b"")
    assert small.service.repository.calls[-1] == call


def test_files_of_a_load_need_the_operator_s_leave(small: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small.service, "takes_model_files", False)
    answer = small.post(LOAD, {"parameters": {"config": "{}"} | FILE})
    assert answer.status_code == 403 and "--allow-model-file-override" in answer.json()["error"]
    assert small.post(LOAD, {"parameters": {"config": "{}"}}).status_code == 200


BROKEN = "failed to parse the request JSON buffer: Missing a name for object member. at 1"


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (INDEX, b"{", 500, BROKEN),
        (LOAD, b"{", 500, BROKEN),
        (
            LOAD,
            {"parameters": {"x": "y"}},
            400,
            "parameter 'x' is none of config, file:PATH, lora_path, base_model_name",
        ),
        (LOAD, {"parameters": {"file:1/model.py": "a"}}, 400, "parameter 'file:1/model.py' is not base64"),
        (LOAD.replace("repository/", "repository/r/"), None, 501, "'repository_name' specification is not supported"),
        (LOAD.replace("/m/", "/nope/"), None, 500, "failed to load 'nope', failed to poll from model repository"),
    ],
)
def test_what_is_not_loaded(small: SmallServer, path: str, body: Any, status: int, error: str) -> None:
    num_calls = len(small.service.repository.calls)
    response = small.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert len(small.service.repository.calls) == num_calls + ("nope" in path)


# --- members of the wrong type ---

KINDS: dict[str, Any] = {
    "string": "yes",
    "number": 1.5,
    "negative": -1,
    "boolean": True,
    "array": [1],
    "object": {"a": 1},
    "null": None,
    "huge": 2**64,
}
MEMBERS: list[tuple[str, dict[str, Any], str, str]] = [
    (INDEX, {}, "ready", "boolean"),
    (LOAD, {}, "parameters", "object"),
    *((REGION, {"key": "/x", "offset": 0, "byte_size": 4}, *each) for each in (("key", "string"), ("offset", ""))),
    (REGION, {"key": "/x", "offset": 0}, "byte_size", ""),
    *(
        (REGION.replace(SYSTEM, CUDA), {"raw_handle": {"b64": "AAAA"}, "byte_size": 4, "device_id": 0}, name, "")
        for name in ("raw_handle", "byte_size", "device_id")
    ),
    *((LOG, {}, name, "boolean null") for name in ("log_info", "log_warning", "log_error")),
    (LOG, {}, "log_verbose_level", "null"),
    (LOG, {}, "log_format", "string null"),
    *((TRACE, {}, name, "string null") for name in ("trace_rate", "trace_count", "log_frequency")),
    (TRACE, {}, "trace_level", "null"),
]
"""Path, the rest of the body, the member, and the kinds of value that it may have."""


@pytest.mark.parametrize(("path", "rest", "name", "allowed"), MEMBERS)
def test_a_member_of_a_wrong_type_is_400_and_named(
    small: SmallServer, path: str, rest: dict[str, Any], name: str, allowed: str
) -> None:
    for kind in KINDS.keys() - allowed.split():
        response = small.post(path, rest | {name: KINDS[kind]})
        assert (response.status_code, f"'{name}'" in response.json()["error"]) == (400, True), (kind, response.text)


@pytest.mark.parametrize(("name", "allowed"), [("config", "string"), ("file:1/model.py", "string"), ("other", "")])
def test_a_parameter_of_a_load_of_a_wrong_type_is_400_and_named(small: SmallServer, name: str, allowed: str) -> None:
    for kind in KINDS.keys() - allowed.split():
        response = small.post(LOAD, {"parameters": {name: KINDS[kind]}})
        assert (response.status_code, f"'{name}'" in response.json()["error"]) == (400, True), kind


@pytest.mark.parametrize("route", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("members", "name"),
    [
        (b'"text_input": "b"', "text_input"),
        (b'"text\\u005finput": "b"', "text_input"),
        (b'"n": 1, "n": 2', "n"),
        (b'"parameters": {"n": 1, "n": 2}', "n"),
        (b'"id": "1", "id": "2"', "id"),
        (b'"n": 1, "text_input": "b", "n": 2', "text_input"),
        (b'"n": 1, "n": 2, "text_input": "b"', "n"),
        (b'"text_input": "b"' + b"".join(b', "p%d": 1' % i for i in range(100)), "text_input"),
    ],
)
def test_a_key_that_stands_twice_in_a_generate_request_is_refused(
    small: SmallServer, route: str, members: bytes, name: str
) -> None:
    answer = small.post(f"/v2/models/text_once/{route}", b'{"text_input": "a", %s}' % members)
    assert answer.status_code == 400 and f"'{name}' already exists in request" in answer.json()["error"]


def test_a_key_may_stand_in_a_value_too(small: SmallServer) -> None:
    for text in (b'"text_input"', b'"\\"text_input\\": 1"', b'"\\u0041"'):
        assert small.post("/v2/models/text_once/generate", b'{"text_input": %s}' % text).status_code == 200


# --- traces ---


def test_traced_requests_leave_their_times(tmp_path: Path) -> None:
    settings = TraceSettings(str(tmp_path / "trace.json"))
    with small_server(SmallService(*all_models(), trace=settings)) as small:
        small.post(TRACE, {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "4"})
        assert small.post(IDENTITY, one() | {"id": "a"}).status_code == 200
        assert small.post("/v2/models/text_once/generate", {"text_input": "x"}).status_code == 200
        assert small.post(IDENTITY, {"inputs": []}).status_code == 400
        assert small.post("/v2/models/text_once/generate", {}).status_code == 400
        assert small.post("/v2/models/text_once/generate", {"text_input": "x"}).status_code == 200
        assert small.get(TRACE).json()["trace_count"] == "0"
    records = json.loads((tmp_path / "trace.json.0").read_text())
    assert [each["model_name"] for each in records if "model_name" in each] == ["identity", "text_once"] * 2
    assert records[0] == {"id": 1, "model_name": "identity", "model_version": 1, "request_id": "a"}
    times = {
        each["name"]: each["ns"]
        for record in records[:20]
        if record["id"] == 1
        for each in record.get("timestamps", ())
    }
    ordered = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "REQUEST_END", "INFER_RESPONSE_COMPLETE"]
    ordered += ["HTTP_SEND_START", "HTTP_SEND_END"]
    assert [times[name] for name in ordered] == sorted(times[name] for name in ordered)
    tensors = [record["tensor"] for record in records if "tensor" in record and record["id"] == 1]
    assert tensors == [{"name": name, "data": "1.5", "shape": "1,1", "dtype": "FP32"} for name in ("INPUT0", "OUTPUT0")]


# --- shared memory ---


def place(size: int, offset: int = 0) -> dict[str, Any]:
    return {"shared_memory_region": "r", "shared_memory_byte_size": size, "shared_memory_offset": offset}


def test_what_cannot_be_registered(small: SmallServer) -> None:
    for kind, path in (("system", SYSTEM), ("cuda", CUDA)):
        answer = small.post(f"{path}/register", {})
        text = f"'region name' is necessary to register {kind} shared memory region"
        assert (answer.status_code, answer.json()) == (400, {"error": text})
    handle = {"raw_handle": {"b64": base64.b64encode(bytes(64)).decode()}, "byte_size": 4}
    answer = small.post(f"{CUDA}/region/x/register", handle)
    assert answer.json() == {"error": "Shared memory register request has no 'device_id' field"}


@pytest.fixture
def region(small: SmallServer) -> Iterator[Path]:
    """Two halves of 3 MiB, which threads copy, registered as `r`; the first has one string."""
    path = Path(f"/dev/shm/sluice_test_{os.getpid()}")
    half = 3 << 20
    path.write_bytes(struct.pack("<I", half - 4) + b"x" * (half - 4) + bytes(half))
    assert small.post(REGION, {"key": f"/{path.name}", "byte_size": 2 * half}).status_code == 200
    yield path
    small.post(f"{SYSTEM}/unregister")
    path.unlink()


def test_a_long_string_in_shared_memory_comes_back(small: SmallServer, region: Path) -> None:
    half = 3 << 20
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "parameters": place(half)}
    outputs = [{"name": "OUTPUT0", "parameters": place(half, half)}]
    assert small.post(STRINGS, {"inputs": [tensor], "outputs": outputs}).status_code == 200
    content = region.read_bytes()
    assert content[half:] == content[:half]
