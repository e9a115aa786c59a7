"""Versions that share requests: weights set and taken back while they serve, and clients that stay on a version."""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.server_process import ServerProcess
from tests.triton.clients import Library

MODEL = "versioned"
ROUTING = f"/v2/repository/models/{MODEL}/routing"
NUM_REQUESTS = 200


@pytest.fixture
def server(triton: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=triton.base_url) as client:
        yield client
        client.post(ROUTING, json={"weights": None}).raise_for_status()


def version_of(client: Any, library: Library, key: str = "", version: str = "") -> str:
    headers = {"x-sluice-sticky": key} if key else None
    tensor = library.tensor("INPUT0", np.array([1], np.int32))
    response = client.infer(MODEL, [tensor], version, headers=headers).get_response(**library.as_json)
    return str(response["model_version"])


def test_a_share_is_kept_by_key_and_taken_back_at_once(server: httpx.Client, client: Any, library: Library) -> None:
    expected = {"model_name": MODEL, "weights": None, "is_set": False, "shares": {"2": 1.0, "1": 0.0}}
    assert server.get(ROUTING).json() == expected and version_of(client, library) == "2"
    shown = server.post(ROUTING, json={"weights": {"1": 75, "2": 25}}).raise_for_status().json()
    assert (shown["is_set"], shown["shares"]) == (True, {"2": 0.25, "1": 0.75})
    chosen = Counter(version_of(client, library) for _ in range(NUM_REQUESTS))
    assert set(chosen) == {"1", "2"}
    sticky = {key: version_of(client, library, key) for key in map(str, range(32))}
    assert set(sticky.values()) == {"1", "2"}
    assert {key: version_of(client, library, key) for key in sticky} == sticky
    assert version_of(client, library, version="2") == "2"
    for weights, every in (({"1": 1}, "1"), (None, "2")):
        server.post(ROUTING, json={"weights": weights}).raise_for_status()
        assert {version_of(client, library, key) for key in sticky} == {every}


ONLY = "the body must hold 'weights' and nothing else"
LEAST = "weights must be numbers of at least 0, and one of them more"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, ONLY),
        ([], ONLY),
        ({"weights": {"1": 1}, "x": 1}, ONLY),
        ({"weights": {"1": "2"}}, 'got {"1":"2"}'),
        ({"weights": {"one": 2}}, 'got {"one":2}'),
        ({"weights": {"1": True}}, 'got {"1":true}'),
        ({"weights": {"1": 0, "2": 0}}, LEAST),
        ({"weights": {"1": -1, "2": 2}}, LEAST),
        ({"weights": {"7": 1}}, "version 7 of model 'versioned' does not serve; those that do: 1, 2"),
    ],
)
def test_what_are_no_weights_is_refused_and_changes_nothing(server: httpx.Client, body: object, reason: str) -> None:
    server.post(ROUTING, json={"weights": {"1": 1, "2": 3}}).raise_for_status()
    answer = server.post(ROUTING, content=json.dumps(body))
    assert answer.status_code == 400 and reason in answer.json()["error"]
    assert server.get(ROUTING).json()["weights"] == {"1": 1, "2": 3}


def test_a_model_that_there_is_not(server: httpx.Client) -> None:
    answer = server.get("/v2/repository/models/nobody/routing")
    assert (answer.status_code, answer.json()["error"]) == (404, "Request for unknown model: 'nobody' is not found")
