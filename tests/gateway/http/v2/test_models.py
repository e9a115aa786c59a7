"""The model repository extension."""

import base64
from typing import Any

import pytest

from serving.backend import LoadOverrides
from tests.gateway.http.v2.small_server import SmallServer

INDEX, LOAD, UNLOAD = "/v2/repository/index", "/v2/repository/models/m/load", "/v2/repository/models/m/unload"


@pytest.mark.parametrize("path", [INDEX, "/v2/repository/any/index"])
def test_the_index(small: SmallServer, path: str) -> None:
    rows = small.post(path).json()
    assert rows[0] == {"name": "identity", "version": "1", "state": "READY"}
    broken = {"name": "broken", "version": "1", "state": "UNAVAILABLE", "reason": "it is broken"}
    assert rows[-2:] == [broken, {"name": "on_demand"}]
    assert small.post(path, {"ready": False}).json() == rows
    assert small.post(path, {"ready": True}).json() == rows[:-2]


@pytest.mark.parametrize(
    ("body", "overrides"),
    [
        (None, None),
        ({}, None),
        ({"parameters": {}}, None),
        ({"parameters": {"config": "{}"}}, LoadOverrides("{}")),
        (
            {"parameters": {"config": "{}", "file:1/model.py": base64.b64encode(b"\0x").decode()}},
            LoadOverrides("{}", (("1/model.py", b"\0x"),)),
        ),
    ],
)
def test_load(small: SmallServer, body: Any, overrides: LoadOverrides | None) -> None:
    response = small.post(LOAD, body)
    assert (response.status_code, response.content) == (200, b"")
    assert small.service.repository.calls[-1] == ("load", "m", overrides)


def test_files_of_a_load_need_the_operator_s_leave(small: SmallServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small.service, "takes_model_files", False)
    file = {"file:1/model.py": base64.b64encode(b"x").decode()}
    answer = small.post(LOAD, {"parameters": {"config": "{}", **file}})
    assert answer.status_code == 403 and "--allow-model-file-override" in answer.json()["error"]
    assert small.post(LOAD, {"parameters": {"config": "{}"}}).status_code == 200


@pytest.mark.parametrize(
    ("body", "unload_dependents"),
    [
        (None, False),
        ({"parameters": {"unload_dependents": True}}, True),
        ({"parameters": {"unload_dependents": 5}}, False),
        ({"parameters": 5}, False),
        (b"{", False),
    ],
)
def test_unload(small: SmallServer, body: Any, unload_dependents: bool) -> None:
    response = small.post(UNLOAD, body)
    assert (response.status_code, response.content) == (200, b"")
    assert small.service.repository.calls[-1] == ("unload", "m", unload_dependents)


@pytest.mark.parametrize(
    ("path", "body", "status", "error"),
    [
        (INDEX, {"ready": "x"}, 400, "Unable to parse 'ready': attempt to access JSON non-boolean as boolean"),
        (INDEX, b"{", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (LOAD, b"{", 500, "failed to parse the request JSON buffer: Missing a name for object member. at 1"),
        (LOAD, {"parameters": 5}, 400, "Unable to parse 'parameters': attempt to get members for non-object"),
        (
            LOAD,
            {"parameters": {"config": 5}},
            400,
            "Unable to parse 'config': attempt to access JSON non-string as string",
        ),
        (
            LOAD,
            {"parameters": {"x": "y"}},
            400,
            "parameter 'x' is none of config, file:PATH, lora_path, base_model_name",
        ),
        (LOAD, {"parameters": {"file:1/model.py": "a"}}, 400, "parameter 'file:1/model.py' is not base64"),
        ("/v2/repository/r/models/m/load", None, 501, "'repository_name' specification is not supported"),
        (
            "/v2/repository/models/nope/load",
            None,
            500,
            "failed to load 'nope', failed to poll from model repository",
        ),
    ],
)
def test_refuses(small: SmallServer, path: str, body: Any, status: int, error: str) -> None:
    num_calls = len(small.service.repository.calls)
    response = small.post(path, body)
    assert (response.status_code, response.json()) == (status, {"error": error})
    assert len(small.service.repository.calls) == num_calls + ("nope" in path)
