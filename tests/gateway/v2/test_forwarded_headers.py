import pytest

from gateway.access.identity import Identity
from gateway.calls import CallLog
from gateway.v2.forwarded_headers import ForwardedHeaders
from sluice.errors import ErrorCode, SluiceError


def test_patterns_match_anywhere_in_a_name_and_in_any_case() -> None:
    headers = [("x-fwd-user", "bob"), ("Also-X-FWD-A", "yes"), ("x-fwd-", "no"), ("host", "h")]
    assert ForwardedHeaders("X-fwd-.").choose(headers) == {"x-fwd-user": "bob", "Also-X-FWD-A": "yes"}


def test_patterns_are_those_of_re2() -> None:
    headers = [("MY_HEADER_1", "a"), ("my_header_2", "b")]
    assert ForwardedHeaders("(?-i)MY_HEADER.*").choose(headers) == {"MY_HEADER_1": "a"}
    assert ForwardedHeaders(r"\pL{2}_\C+").choose([("my_x", "c"), ("a_x", "d")]) == {"my_x": "c"}


def test_without_a_pattern_nothing_is_forwarded() -> None:
    for pattern in (None, ""):
        assert not ForwardedHeaders(pattern)
        assert ForwardedHeaders(pattern).choose([("priority", "1")]) == {}


@pytest.mark.parametrize("name", ["sequence_id", "priority", "timeout", "headers", "binary_data_output", "triton_x"])
def test_names_with_a_meaning_of_their_own_are_refused(name: str) -> None:
    with pytest.raises(SluiceError) as caught:
        ForwardedHeaders(".*").choose([("host", "h"), (name, "1")])
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.message == f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    assert ForwardedHeaders("^x-").choose([(name, "1")]) == {}


async def test_a_key_of_the_server_is_not_forwarded() -> None:
    headers = [("Authorization", "Bearer key"), ("x-api-key", "key"), ("x-user", "bob")]
    assert ForwardedHeaders(".*").choose(headers) == dict(headers)
    CallLog().open("v2", "/v2/models/m/infer", "id").identity = Identity(name="ci")
    assert ForwardedHeaders(".*").choose(headers) == {"x-user": "bob"}
