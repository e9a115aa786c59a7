"""The trace and logging extensions over HTTP; answers are those of a recorded Triton 2.51."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.v2.trace import TraceSettings
from tests.gateway.http.v2.models import all_models
from tests.gateway.http.v2.small_server import SmallServer, small_server
from tests.gateway.v2.small_service import SmallService

TRACE, LOG, OF_MODEL = "/v2/trace/setting", "/v2/logging", "/v2/models/identity/trace/setting"
UNTOUCHED = {
    "trace_level": ["OFF"],
    "trace_rate": "1000",
    "trace_count": "-1",
    "log_frequency": "0",
    "trace_file": "",
    "trace_mode": "triton",
}


@pytest.fixture
def fresh() -> Iterator[SmallServer]:
    with small_server(SmallService(*all_models())) as running:
        yield running


def test_trace_settings_fall_back(fresh: SmallServer) -> None:
    assert fresh.get(TRACE).json() == fresh.get(OF_MODEL).json() == UNTOUCHED
    assert fresh.post(OF_MODEL, {"trace_rate": "77"}).json() == UNTOUCHED | {"trace_rate": "77"}
    assert fresh.post(TRACE, {"trace_count": "9", "nope": 1}).json() == UNTOUCHED | {"trace_count": "9"}
    assert fresh.get(OF_MODEL).json() == UNTOUCHED | {"trace_rate": "77", "trace_count": "9"}
    assert fresh.post(OF_MODEL, {"trace_rate": None}).json() == UNTOUCHED | {"trace_count": "9"}
    assert fresh.post(TRACE, {"trace_count": None}).json() == UNTOUCHED
    for body in (b"[]", b"5", b"{}"):
        assert fresh.post(TRACE, body).json() == UNTOUCHED


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (TRACE, b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (TRACE, {"trace_rate": 10}, 400, "Unable to parse 'trace_rate': attempt to access JSON non-string as string"),
        (
            TRACE,
            {"trace_level": "OFF"},
            400,
            "Unable to parse 'trace_level': attempt to access JSON non-array as array",
        ),
        (
            TRACE,
            {"trace_level": [5]},
            400,
            "Unable to parse 'trace_level': attempt to access JSON non-string as string",
        ),
        (
            TRACE,
            {"trace_level": ["TIMESTAMPS"]},
            400,
            "Attempting to set invalid trace setting :trace file name is not given",
        ),
        (TRACE, {"trace_file": "x"}, 501, "trace file location can not be updated through network protocol"),
        ("/v2/models/nope/trace/setting", {}, 400, "Request for unknown model : nope"),
        (LOG, b"", 500, "failed to parse the request JSON buffer: The document is empty. at 0"),
        (LOG, {"log_info": "x"}, 400, "Unable to parse 'log_info': attempt to access JSON non-boolean as boolean"),
        (
            LOG,
            {"log_verbose_level": -1},
            400,
            "Unable to parse 'log_verbose_level': attempt to access JSON non-unsigned-integer as unsigned-integer",
        ),
        (LOG, {"log_format": 5}, 400, "Unable to parse 'log_format': attempt to access JSON non-string as string"),
        (LOG, {"log_format": "x"}, 503, "invalid argument for --log_format, got: x"),
        (LOG, {"log_file": "x"}, 501, "log file location can not be updated through network protocol"),
    ],
)
def test_refuses(fresh: SmallServer, path: str, body: Any, status: int, error: str) -> None:
    response = fresh.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": error})


def test_log_settings(fresh: SmallServer) -> None:
    untouched = {
        "log_file": "",
        "log_info": True,
        "log_warning": True,
        "log_error": True,
        "log_verbose_level": 0,
        "log_format": "default",
    }
    assert fresh.get(LOG).json() == untouched
    changes = {"log_info": False, "log_verbose_level": 2, "log_format": "ISO8601"}
    assert fresh.post(LOG, changes | {"log_file": None, "nope": 1}).json() == untouched | changes
    assert fresh.post(LOG, {"log_info": None}).json() == untouched | changes


def test_a_traced_request_leaves_its_times(tmp_path: Path) -> None:
    settings = TraceSettings(str(tmp_path / "trace.json"))
    tensor = {"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}
    with small_server(SmallService(*all_models(), trace=settings)) as small:
        small.post(TRACE, {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1", "trace_count": "2"})
        assert small.post("/v2/models/identity/infer", {"inputs": [tensor], "id": "a"}).status_code == 200
        assert small.post("/v2/models/text_once/generate", {"text_input": "x"}).status_code == 200
        assert small.post("/v2/models/text_once/generate", {"text_input": "x"}).status_code == 200
        assert small.get(TRACE).json()["trace_count"] == "0"
    records = json.loads((tmp_path / "trace.json.0").read_text())
    assert [record["model_name"] for record in records if "model_name" in record] == ["identity", "text_once"]
    assert records[0] == {"id": 1, "model_name": "identity", "model_version": 1, "request_id": "a"}
    times = {
        each["name"]: each["ns"] for record in records if record["id"] == 1 for each in record.get("timestamps", ())
    }
    ordered = ["HTTP_RECV_START", "HTTP_RECV_END", "REQUEST_START", "REQUEST_END", "INFER_RESPONSE_COMPLETE"]
    ordered += ["HTTP_SEND_START", "HTTP_SEND_END"]
    assert [times[name] for name in ordered] == sorted(times[name] for name in ordered)
    tensors = [record["tensor"] for record in records if "tensor" in record and record["id"] == 1]
    assert tensors == [{"name": name, "data": "1.5", "shape": "1,1", "dtype": "FP32"} for name in ("INPUT0", "OUTPUT0")]


def test_a_traced_request_that_is_refused_leaves_its_trace_too(tmp_path: Path) -> None:
    settings = TraceSettings(str(tmp_path / "trace.json"))
    with small_server(SmallService(*all_models(), trace=settings)) as small:
        small.post(TRACE, {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "2"})
        assert small.post("/v2/models/identity/infer", {"inputs": []}).status_code == 400
        assert small.post("/v2/models/text_once/generate", {}).status_code == 400
    records = json.loads((tmp_path / "trace.json.0").read_text())
    assert [record["model_name"] for record in records if "model_name" in record] == ["identity", "text_once"]
