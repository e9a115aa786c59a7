import pytest

from sluice.errors import ErrorCode
from sluice.gateway.api.v2.forwarded_headers import ForwardedHeaders
from sluice.gateway.calls import CallLog
from sluice.gateway.tenancy.access.identity import Identity
from tests.errors import error_of


@pytest.mark.parametrize(
    ("pattern", "sent", "forwarded"),
    [
        pytest.param(
            "X-fwd-.", "x-fwd-user Also-X-FWD-A x-fwd- host", "x-fwd-user Also-X-FWD-A", id="anywhere, any case"
        ),
        pytest.param("(?-i)MY_HEADER.*", "MY_HEADER_1 my_header_2", "MY_HEADER_1", id="case counts in RE2's way"),
        pytest.param(r"\pL{2}_\C+", "my_x a_x", "my_x", id="classes of RE2"),
        pytest.param(None, "priority", "", id="no pattern"),
        pytest.param("", "priority", "", id="an empty pattern"),
        pytest.param("^x-", "sequence_id", "", id="a reserved name that does not match"),
    ],
)
def test_headers_whose_names_match(pattern: str | None, sent: str, forwarded: str) -> None:
    found = ForwardedHeaders(pattern)
    assert bool(found) is bool(pattern)
    assert found.choose([(name, "v") for name in sent.split()]) == dict.fromkeys(forwarded.split(), "v")


@pytest.mark.parametrize("name", ["sequence_id", "priority", "timeout", "headers", "binary_data_output", "triton_x"])
def test_names_with_a_meaning_of_their_own_are_refused(name: str) -> None:
    error = error_of(ForwardedHeaders(".*").choose, [("host", "h"), (name, "1")])
    text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert (error.code, error.message) == (ErrorCode.INVALID, text)


async def test_a_key_of_the_server_is_not_forwarded() -> None:
    headers = [("Authorization", "Bearer key"), ("x-api-key", "key"), ("x-user", "bob")]
    assert ForwardedHeaders(".*").choose(headers) == dict(headers)
    CallLog().open("v2", "/v2/models/m/infer", "id").identity = Identity(name="ci")
    assert ForwardedHeaders(".*").choose(headers) == {"x-user": "bob"}
