"""Requests as agent programs send them whose sources are public and which no test can start. `make test-clients` runs
the programs that it can."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.front.http.live import LiveServer

FOLDER = Path(__file__).parents[2] / "data" / "agents" / "by_hand"
REQUESTS = [
    pytest.param(request, id=f"{file.stem}-{index}")
    for file in sorted(FOLDER.glob("*.json"))
    for index, request in enumerate(json.loads(file.read_text()))
]
FAILURES = (b'data: {"error"', b"event: error", b"event: response.failed")
"""How a stream ends that fails in the three protocols."""


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_an_agent_sends_is_answered(chat_live: LiveServer, request_: dict[str, Any]) -> None:
    response = chat_live.post(request_["path"], request_["body"], headers=request_.get("headers"))
    assert response.status_code == 200, response.text
    assert not any(failure in response.content for failure in FAILURES), response.text
