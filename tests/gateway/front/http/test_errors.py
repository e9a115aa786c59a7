from typing import Annotated, Literal

import orjson
import pytest
from pydantic import BaseModel, Field, StringConstraints, ValidationError, field_validator

from sluice.engine.frames import request_failed
from sluice.errors import ErrorCode, SluiceError, invalid, named, too_long
from sluice.gateway.front.http.errors import (
    HTTP_STATUS,
    OPENAI_CODE,
    OPENAI_TYPE,
    as_sluice_error,
    client_names,
    error_response,
    requirement,
)


def test_every_code_has_a_status_a_type_and_openai_s_code() -> None:
    assert HTTP_STATUS.keys() == OPENAI_TYPE.keys() == OPENAI_CODE.keys() == set(ErrorCode)


@pytest.mark.parametrize("path", ["/v1/completions", "/health", "/", "/v2x", "/nope"])
def test_openai_shape(path: str) -> None:
    response = error_response(path, SluiceError(ErrorCode.INVALID, "top_p is 2", param="top_p"))
    expected = {"message": "top_p is 2", "type": "invalid_request_error", "param": "top_p", "code": "invalid_value"}
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


@pytest.mark.parametrize(
    ("seconds", "header", "exact"), [(0.2, "1", "200"), (1.0, "1", "1000"), (2.1, "3", "2100"), (0.0, "1", "1")]
)
def test_retry_after_is_whole_seconds_rounded_up_and_exact_in_milliseconds(
    seconds: float, header: str, exact: str
) -> None:
    response = error_response("/v1/x", SluiceError(ErrorCode.OVERLOADED, "full", retry_after_s=seconds))
    assert response.status_code == 429
    assert response.headers["retry-after"] == header
    assert response.headers["retry-after-ms"] == exact


def test_an_unexpected_error_tells_the_client_nothing_but_the_id(caplog: pytest.LogCaptureFixture) -> None:
    error = as_sluice_error(KeyError("secret path /srv/x"), "req-1")
    assert error.code is ErrorCode.INTERNAL
    assert error.message == "internal server error; the server's log has the details under request id req-1"
    assert "secret path" in caplog.text


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SluiceError(ErrorCode.UNAUTHENTICATED, "no"), "invalid_api_key"),
        (SluiceError(ErrorCode.OVERLOADED, "full"), "rate_limit_exceeded"),
        (SluiceError(ErrorCode.OVERLOADED, "spent", openai_code="insufficient_quota"), "insufficient_quota"),
        (too_long("messages", "long"), "context_length_exceeded"),
        (SluiceError(ErrorCode.INVALID, "the request body is not valid JSON"), None),
    ],
)
def test_failures_have_openai_s_codes(error: SluiceError, code: str | None) -> None:
    assert orjson.loads(error_response("/v1/chat/completions", error).body)["error"]["code"] == code


@pytest.mark.parametrize(
    ("name", "header"), [("timeout_s", "x-sluice-timeout-ms"), ("queue_timeout_s", "x-sluice-queue-timeout-ms")]
)
def test_a_deadline_is_named_as_the_header_that_sets_it(name: str, header: str) -> None:
    response = error_response("/v1/chat/completions", SluiceError(ErrorCode.DEADLINE, "too late", param=name))
    assert orjson.loads(response.body)["error"]["param"] == header


class Checked(BaseModel):
    """A body with each kind of rule that schemas have."""

    number: Annotated[int, Field(ge=1)] = 1
    word: Annotated[str, StringConstraints(pattern="^[a-z]+$")] = "a"
    names: Annotated[dict[str, int], Field(max_length=1)] = {}
    kind: Literal["a", "b"] = "a"
    window: str = "24h"

    @field_validator("window")
    @classmethod
    def _check_window(cls, text: str) -> str:
        if not text.endswith("h"):
            raise ValueError("a number and h")
        return text


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"number": "x"}, "must be a valid integer, unable to parse string as an integer"),
        ({"number": 0}, "must be greater than or equal to 1"),
        ({"word": "A"}, "must match pattern '^[a-z]+$'"),
        ({"kind": "c"}, "must be 'a' or 'b'"),
        ({"window": "soon"}, "must be a number and h"),
    ],
)
def test_a_refused_value_is_told_what_it_must_be_once(fields: dict[str, object], expected: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Checked.model_validate(fields)
    assert requirement(refused.value.errors()[0]) == expected


def test_errors_name_fields_as_the_client_does_over_the_wire_too() -> None:
    with pytest.raises(SluiceError) as caught, client_names({"max_tokens": "request_output_len", "query": "prompt"}):
        raise request_failed(1, invalid("max_tokens", f"{named('max_tokens')} is 3, not max_tokens")).to_error()
    assert (caught.value.param, caught.value.message) == (
        "request_output_len",
        "request_output_len is 3, not max_tokens",
    )
