import orjson
import pytest

from gateway.http.errors import HTTP_STATUS, OPENAI_TYPE, as_sluice_error, error_response
from sluice.errors import ErrorCode, SluiceError


def test_every_code_has_a_status_and_a_type() -> None:
    assert HTTP_STATUS.keys() == OPENAI_TYPE.keys() == set(ErrorCode)


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/", "/v2x", "/nope"])
def test_openai_shape(path: str) -> None:
    response = error_response(path, SluiceError(ErrorCode.INVALID, "top_p is 2", param="top_p"))
    expected = {"message": "top_p is 2", "type": "invalid_request_error", "param": "top_p", "code": "invalid"}
    assert response.status_code == 400
    assert orjson.loads(response.body) == {"error": expected}


@pytest.mark.parametrize("path", ["/v2", "/v2/models/rill/generate"])
def test_v2_shape(path: str) -> None:
    response = error_response(path, SluiceError(ErrorCode.UNIMPLEMENTED, "not here"))
    assert response.status_code == 501
    assert response.body == b'{"error":"not here"}'


def test_unknown_model_has_openai_s_code() -> None:
    response = error_response("/v1/chat/completions", SluiceError(ErrorCode.NOT_FOUND, "no", param="model"))
    assert response.status_code == 404
    assert orjson.loads(response.body)["error"]["code"] == "model_not_found"


@pytest.mark.parametrize(("seconds", "header"), [(0.2, "1"), (1.0, "1"), (2.1, "3")])
def test_retry_after_is_whole_seconds_rounded_up(seconds: float, header: str) -> None:
    response = error_response("/v1/x", SluiceError(ErrorCode.OVERLOADED, "full", retry_after_s=seconds))
    assert response.status_code == 429
    assert response.headers["retry-after"] == header


def test_an_unexpected_error_tells_the_client_nothing_but_the_id(caplog: pytest.LogCaptureFixture) -> None:
    error = as_sluice_error(KeyError("secret path /srv/x"), "req-1")
    assert error.code is ErrorCode.INTERNAL
    assert error.message == "internal server error; the server's log has the details under request id req-1"
    assert "secret path" in caplog.text
