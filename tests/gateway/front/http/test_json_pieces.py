"""Documents parsed in pieces: the same as parsed at once, whatever the pieces, and bounded."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.gateway.front.http.json_pieces import MAX_DEPTH, DocumentError, DocumentLimits, parse_pieces

TEXTS = st.text(alphabet=st.sampled_from('a,:"\\[]{}\n\u0001 é中😀'), max_size=80)
SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False, allow_infinity=False)
VALUES: st.SearchStrategy[Any] = st.recursive(
    SCALARS | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=20,
)


def encode(value: object, is_ascii: bool = False, indent: int | None = None) -> bytes:
    return json.dumps(value, ensure_ascii=is_ascii, indent=indent).encode()


@given(VALUES, st.booleans(), st.none() | st.integers(0, 5), st.integers(1, 70))
@settings(deadline=None, max_examples=25)
def test_a_document_in_pieces_is_the_document(value: Any, is_ascii: bool, indent: int | None, size: int) -> None:
    body = encode(value, is_ascii, indent)
    assert orjson.dumps(parse_pieces(body, piece_bytes=size)) == orjson.dumps(orjson.loads(body))


@given(VALUES, st.data(), st.integers(1, 70))
@settings(deadline=None, max_examples=25)
def test_a_broken_document_is_refused_in_pieces_as_at_once(value: Any, data: st.DataObject, size: int) -> None:
    body = bytearray(encode(value))
    body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.sampled_from(b'{}[],:"\\a1 \xff'))
    broken = bytes(body[: data.draw(st.integers(0, len(body)))])
    try:
        expected = orjson.loads(broken)
    except orjson.JSONDecodeError:
        with pytest.raises(DocumentError):
            parse_pieces(broken, piece_bytes=size)
    else:
        assert parse_pieces(broken, piece_bytes=size) == expected


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b'{"a":[1,2],"b":3,"a":[4,5,6,7,8,9]}', "an object has a name twice"),
        (b"[" * (MAX_DEPTH + 1), "recursion limit exceeded"),
        (b'["' + b"x" * 500, "unexpected end of data in a string"),
        (b"[1]" + b",[2]" * 500, "unexpected content after document"),
    ],
)
def test_what_cannot_be_cut_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(DocumentError, match=reason):
        parse_pieces(body, piece_bytes=24)


@pytest.mark.parametrize("body", [b'{"' + b"k" * (2 << 20) + b'":1}', b"[" + b"1" * (2 << 20) + b"]"])
def test_names_and_numbers_of_megabytes_are_refused(body: bytes) -> None:
    with pytest.raises(DocumentError, match="a name or a number is too long"):
        parse_pieces(body)


def test_a_string_has_at_most_so_many_characters() -> None:
    text = "\u4e2d" * 1000
    assert parse_pieces(encode([text, text]), DocumentLimits(string_chars=1000), piece_bytes=64) == [text, text]
    with pytest.raises(DocumentError, match="a string of more than 999 characters"):
        parse_pieces(encode([text]), DocumentLimits(string_chars=999), piece_bytes=64)


def test_megabytes_of_white_space_are_no_content() -> None:
    assert parse_pieces(b'{"a"' + b" " * (3 << 20) + b":\n1" + b"\t" * (3 << 20) + b"}") == {"a": 1}


@pytest.mark.parametrize("body", [b"[" + b"1," * 400 + b"1]", b"[" + b'"",' * 400 + b"1]"])
def test_a_document_has_at_most_so_many_values(body: bytes) -> None:
    assert len(parse_pieces(body, DocumentLimits(values=401), piece_bytes=64)) == 401
    with pytest.raises(DocumentError, match="more than 400 values"):
        parse_pieces(body, DocumentLimits(values=400), piece_bytes=64)


@pytest.mark.parametrize("body", [b"[" + b"{}," * 99 + b"{}]", encode({str(i): [] for i in range(50)})])
def test_a_document_has_at_most_so_many_members(body: bytes) -> None:
    parse_pieces(body, DocumentLimits(members=101), piece_bytes=64)
    with pytest.raises(DocumentError, match="more than 100 members"):
        parse_pieces(body, DocumentLimits(members=100), piece_bytes=64)


@pytest.mark.parametrize("body", [encode(["", "a"] * 50), encode({str(i): "" for i in range(50)})])
def test_a_document_has_at_most_so_many_strings(body: bytes) -> None:
    parse_pieces(body, DocumentLimits(strings=100), piece_bytes=64)
    with pytest.raises(DocumentError, match="more than 99 strings"):
        parse_pieces(body, DocumentLimits(strings=99), piece_bytes=64)


def test_commas_and_brackets_in_strings_are_not_counted() -> None:
    text = ',[]{}:\\"' * 1000
    assert parse_pieces(encode([text]), DocumentLimits(values=1, members=1), piece_bytes=64) == [text]
