"""Long documents of the v2 protocol: the same as short ones, whatever the windows, and bounded."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.http import generate, json_document
from sluice.gateway.api.v2.http.json_document import LIMITS, ArrayText, parse, parse_document
from sluice.serving.tensors import byte_strings
from tests.gateway.api.v2.http.models import identity
from tests.gateway.api.v2.http.small_server import small_server
from tests.gateway.api.v2.small_service import SmallService

TEXTS = st.text(alphabet=st.sampled_from('a,:"\\[]{}\n\u0001 é中😀'), max_size=80)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def flat(value: object) -> Any:
    """Return `value` with nested arrays as one, and long ones read."""
    if isinstance(value, ArrayText):
        return [each for piece in value.pieces() for each in flat(piece)]
    if isinstance(value, list):
        parts = [(flat(each), isinstance(each, list | ArrayText)) for each in value]
        return [one for part, is_array in parts for one in (part if is_array else [part])]
    if isinstance(value, dict):
        return {name: flat(each) for name, each in value.items()}
    return value


def parse_in_windows(body: bytes, size: int) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_document, "INLINE_BYTES", 0)
        patch.setattr(json_document, "MIN_ARRAY_BYTES", 3)
        patch.setattr(json_document, "_WINDOW_BYTES", size)
        return flat(parse_document(body))


@given(VALUES, st.booleans(), st.none() | st.integers(0, 5), st.integers(4, 70))
@settings(deadline=None)
def test_a_long_document_is_the_document(value: Any, is_ascii: bool, indent: int | None, size: int) -> None:
    body = json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()
    assert orjson.dumps(parse_in_windows(body, size)) == orjson.dumps(flat(orjson.loads(body)))


@given(VALUES, st.data(), st.integers(4, 70))
@settings(deadline=None)
def test_a_broken_long_document_is_refused(value: Any, data: st.DataObject, size: int) -> None:
    body = bytearray(json.dumps(value).encode())
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.sampled_from(b'{}[],:"\\a1 '))
    del body[data.draw(st.integers(1, len(body))) :]
    try:
        expected = flat(parse(bytes(body)))
    except SluiceError:
        with pytest.raises(SluiceError):
            parse_in_windows(bytes(body), size)
    else:
        assert parse_in_windows(bytes(body), size) == expected


@pytest.mark.parametrize(
    ("body", "code", "reason"),
    [
        (b"[" * 100_000, ErrorCode.INVALID, "nesting depth exceeds"),
        (b'{"a":[' + b"{}," * 100_000 + b"1]}", ErrorCode.INVALID, f"more than {LIMITS.members} objects"),
        (b'{"a":{' + b'"b":1,' * 100_000 + b'"c":1}}', ErrorCode.INVALID, f"more than {LIMITS.members} members"),
        (b'"' + b"\\" * 2_000_001, ErrorCode.INTERNAL, "too long"),
    ],
)
def test_what_takes_long_is_refused(body: bytes, code: ErrorCode, reason: str) -> None:
    with pytest.raises(SluiceError, match=reason) as caught:
        parse_document(body)
    assert caught.value.code is code


@pytest.mark.parametrize("data", [b"1.5,NaN,3", b"1,2,true", b"1,2]", b"[1,2]"])
def test_an_array_is_read_when_its_type_is_known(data: bytes) -> None:
    body = b'{"data":[' + b"1," * 100_000 + data + b"]}"
    document = parse_document(body) if data != b"1,2]" else None
    if document is None:
        with pytest.raises(SluiceError):
            parse_document(body)
        return
    assert isinstance(document, dict) and isinstance(document["data"], ArrayText)
    assert document["data"].is_nested == (data == b"[1,2]")
    assert len(flat(document["data"])) == 100_000 + (2 if data == b"[1,2]" else 3)


MANY = 20_000


def infer_body(datatype: str, values: list[Any], **more: Any) -> dict[str, Any]:
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [len(values)], "data": values}
    return {"inputs": [tensor], **more}


@pytest.mark.parametrize(
    ("datatype", "config", "values"),
    [
        ("FP32", "TYPE_FP32", [0.5, -3, 0.25]),
        ("INT64", "TYPE_INT64", [1, -(2**63), 2**63 - 1]),
        ("BOOL", "TYPE_BOOL", [True, False, True]),
        ("BYTES", "TYPE_STRING", ['a"b,[', "é\n", ""]),
    ],
)
def test_a_long_tensor_comes_back_as_it_was_sent(datatype: str, config: str, values: list[Any]) -> None:
    sent = values * MANY
    with small_server(SmallService(identity("identity", config, "-1"))) as server:
        answer = server.post("/v2/models/identity/infer", infer_body(datatype, sent))
        assert answer.status_code == 200, answer.text[:300]
        output = answer.json()["outputs"][0]
        assert output["shape"] == [len(sent)] and output["data"][:3] == values
        assert output["data"] == output["data"][:3] * MANY
        answer = server.post("/v2/models/identity/generate", {"INPUT0": sent})
        assert answer.json()["OUTPUT0"] == output["data"]


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ([1.5] * MANY + ["x"], "Unable to parse 'data': attempt to access JSON non-number as double"),
        ([1.5] * MANY + [[1, 2]], "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ],
)
def test_a_long_tensor_that_does_not_fit_is_refused_as_a_short_one(values: list[Any], error: str) -> None:
    with small_server(SmallService(identity("identity", "TYPE_FP32", "-1"))) as server:
        answer = server.post("/v2/models/identity/infer", infer_body("FP32", values))
        assert (answer.status_code, answer.json()) == (500, {"error": error})


def test_more_strings_than_a_tensor_may_have_are_refused() -> None:
    with small_server(SmallService(identity("identity", "TYPE_STRING", "-1"))) as server:
        answer = server.post("/v2/models/identity/infer", infer_body("BYTES", [""] * (byte_strings.MAX_ELEMENTS + 1)))
        assert answer.status_code == 400 and f"at most {byte_strings.MAX_ELEMENTS} are taken" in answer.json()["error"]


@pytest.mark.parametrize("num_before", range(10))
def test_a_key_of_a_long_body_is_found_twice_wherever_it_is_cut(
    num_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generate, "_SEARCHED_BYTES", 7)
    monkeypatch.setattr(generate, "INLINE_BYTES", 0)
    body = b'{%s"key":1,"key" :2,"other":"key"}' % (b" " * num_before)
    assert generate.find_repeated(parse(body), body) == ["key"]


def test_a_long_generate_request_of_many_keys_is_refused() -> None:
    document = {"text": " " * json_document.INLINE_BYTES, "parameters": dict.fromkeys(map(str, range(63)), 1)}
    with pytest.raises(SluiceError, match="may have 64 keys, got 65") as caught:
        generate.find_repeated(document, orjson.dumps(document))
    assert caught.value.code is ErrorCode.INVALID
