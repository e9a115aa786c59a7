"""Bodies in pieces, limits, and the statuses of failures."""

import json
from collections.abc import Iterator

import pytest

from gateway.http.v2.exchange import V2_STATUS
from gateway.options.config import ServeConfig
from gateway.options.http import HttpOptions
from sluice.errors import ErrorCode
from tests.gateway.http.v2.models import all_models
from tests.gateway.http.v2.small_server import SmallServer, small_server
from tests.gateway.v2.small_service import SmallService

IDENTITY = "/v2/models/identity/infer"
BODY = json.dumps({"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [1.5]}]}).encode()
LIMIT_BYTES = 1000


@pytest.fixture(scope="module")
def narrow() -> Iterator[SmallServer]:
    config = ServeConfig(http=HttpOptions(max_input_bytes=LIMIT_BYTES))
    with small_server(SmallService(*all_models()), config) as running:
        yield running


def in_pieces(body: bytes, size: int) -> Iterator[bytes]:
    """Yield a body in chunks, for Transfer-Encoding: chunked."""
    for start in range(0, len(body), size):
        yield body[start : start + size]


@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_body_may_come_in_chunks(narrow: SmallServer, size: int) -> None:
    response = narrow.client.post(IDENTITY, content=in_pieces(BODY, size))
    assert response.json()["outputs"][0]["data"] == [1.5]


def test_a_body_of_just_the_limit(narrow: SmallServer) -> None:
    assert narrow.post(IDENTITY, BODY.ljust(LIMIT_BYTES)).status_code == 200
    assert narrow.client.post(IDENTITY, content=in_pieces(BODY.ljust(LIMIT_BYTES), 100)).status_code == 200


@pytest.mark.parametrize("path", [IDENTITY, "/v2/models/text_once/generate", "/v2/repository/index", "/v2/logging"])
@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_body_over_the_limit(narrow: SmallServer, path: str, is_chunked: bool) -> None:
    body = BODY.ljust(LIMIT_BYTES + 1)
    response = narrow.client.post(path, content=in_pieces(body, 100) if is_chunked else body)
    assert response.status_code == 400
    size = f"more than {LIMIT_BYTES}" if is_chunked else str(LIMIT_BYTES + 1)
    assert response.json()["error"] == (
        f"request JSON size of {size} bytes exceeds the maximum allowed input size of {LIMIT_BYTES} bytes. Use "
        "--http-max-input-size to increase the limit."
    )
    assert response.headers["connection"] == "close"


def test_every_code_has_a_status() -> None:
    assert V2_STATUS.keys() == set(ErrorCode)
