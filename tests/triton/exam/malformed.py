"""Requests that are wrong in form: tensors described wrongly, JSON that is not, HTTP framing."""

from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import JSON_TYPE, add_sub_inputs, encode, http, infer, inputs, int32
from tests.triton.records import Exchange
from tests.triton.wire import base64_text

GOOD = encode(int32([1, 2]))
INFER = "/v2/models/identity_int32/infer"


def questions() -> Iterator[Exchange]:
    yield from _tensors()
    yield from _documents()
    yield from _framing()
    yield from _large()


def _tensors() -> Iterator[Exchange]:
    left, right = add_sub_inputs()["inputs"]
    asked: dict[str, Any] = {
        "missing_input": inputs(left),
        "no_inputs": inputs(),
        "inputs_null": {"inputs": None},
        "inputs_object": {"inputs": left},
        "inputs_of_numbers": {"inputs": [1, 2]},
        "inputs_absent": {"outputs": []},
        "extra_input": inputs(left, right, left | {"name": "INPUT2"}),
        "duplicate_input": inputs(left, left),
        "duplicate_input_three": inputs(left, right, right),
        "wrong_datatype": inputs(left | {"datatype": "INT32", "data": [1, 2, 3, 4]}, right),
        "unknown_datatype": inputs(left | {"datatype": "FP99"}, right),
        "lowercase_datatype": inputs(left | {"datatype": "fp32"}, right),
        "config_datatype": inputs(left | {"datatype": "TYPE_FP32"}, right),
        "datatype_missing": inputs({key: value for key, value in left.items() if key != "datatype"}, right),
        "datatype_number": inputs(left | {"datatype": 5}, right),
        "datatype_empty": inputs(left | {"datatype": ""}, right),
        "shape_missing": inputs({key: value for key, value in left.items() if key != "shape"}, right),
        "name_missing": inputs({key: value for key, value in left.items() if key != "name"}, right),
        "name_number": inputs(left | {"name": 5}, right),
        "name_empty": inputs(left | {"name": ""}, right),
        "name_lowercase": inputs(left | {"name": "input0"}, right),
        "data_null": inputs(left | {"data": None}, right),
        "data_text": inputs(left | {"data": "1234"}, right),
        "data_number": inputs(left | {"data": 5}, right),
        "data_object": inputs(left | {"data": {"a": 1}}, right),
        "data_bool": inputs(left | {"data": True}, right),
        "data_empty": inputs(left | {"data": []}, right),
        "parameters_text": inputs(left | {"parameters": "x"}, right),
        "parameters_null": inputs(left | {"parameters": None}, right),
        "unknown_member": inputs(left | {"foo": 1}, right),
        "unknown_top_member": inputs(left, right, foo=1),
        "batches_differ": inputs(left | {"shape": [2, 4], "data": [1] * 8}, right),
        "wrong_columns": inputs(left | {"shape": [1, 5], "data": [1] * 5}, right),
        "no_batch": inputs(left | {"shape": [4]}, right | {"shape": [4]}),
        "rank_too_high": inputs(left | {"shape": [1, 1, 4]}, right),
        "with_id": inputs(left, id="request-7"),
    }
    for name, body in asked.items():
        yield infer(f"tensor/{name}", "add_sub", body)


def _documents() -> Iterator[Exchange]:
    text = GOOD.decode()
    asked: dict[str, bytes | str] = {
        "empty": "",
        "spaces": "   ",
        "array": "[]",
        "number": "5",
        "text": '"x"',
        "null": "null",
        "true": "true",
        "truncated": text[:-5],
        "trailing_brace": text + "}",
        "trailing_text": text + " x",
        "trailing_document": text + text,
        "trailing_newlines": text + "\r\n\n",
        "trailing_zero": text + "\0",
        "leading_spaces": "\n\t " + text,
        "byte_order_mark": b"\xef\xbb\xbf" + GOOD,
        "utf16": text.encode("utf-16"),
        "comment": text[:-1] + "/* x */}",
        "line_comment": "// x\n" + text,
        "trailing_comma": text[:-1] + ",}",
        "single_quotes": text.replace('"', "'"),
        "unquoted_key": text.replace('"inputs"', "inputs"),
        "duplicate_inputs": text[:-1] + ', "inputs": []}',
        "duplicate_inputs_last": '{"inputs": [], ' + text[1:],
        "duplicate_name": text.replace('"name": "INPUT0"', '"name": "INPUT0", "name": "Q"'),
        "escaped_key": text.replace('"inputs"', r'"\u0069nputs"'),
        "not_utf8": GOOD.replace(b"INPUT0", b"\xff\xfe"),
        "not_utf8_unused": GOOD[:-1] + b', "x": "\xff"}',
        "raw_control": text.replace("INPUT0", "INP\x01UT0"),
        "deep_unused": text[:-1] + ', "x": ' + "[" * 60 + "]" * 60 + "}",
        "nan_unused": text[:-1] + ', "x": NaN}',
        "infinity_unused": text[:-1] + ', "x": Infinity}',
        "huge_number_unused": text[:-1] + ', "x": 1e999}',
    }
    for name, body in asked.items():
        yield infer(f"json/{name}", "identity_int32", body)


def _framing() -> Iterator[Exchange]:
    size = len(GOOD)
    chunked = b"%x\r\n%s\r\n0\r\n\r\n" % (size, GOOD)
    in_three = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (GOOD[:7], GOOD[7:20], GOOD[20:]))
    transfer = ("Transfer-Encoding", "chunked")
    yield infer("framing/chunked", "identity_int32", chunked, [transfer, JSON_TYPE])
    yield infer("framing/chunked_in_three", "identity_int32", in_three + b"0\r\n\r\n", [transfer, JSON_TYPE])
    yield infer("framing/expect_continue", "identity_int32", GOOD, [("Expect", "100-continue"), JSON_TYPE])
    yield infer("framing/connection_close", "identity_int32", GOOD, [("Connection", "close"), JSON_TYPE])
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", ""):
        yield infer(f"framing/content_type_{kind or 'empty'}", "identity_int32", GOOD, [("Content-Type", kind)])
    yield infer("framing/accept_text", "identity_int32", GOOD, [("Accept", "text/plain"), JSON_TYPE])
    yield infer("framing/query", "identity_int32/infer?x=1#", GOOD)
    yield http("framing/infer_get_with_body", "GET", INFER, GOOD, [JSON_TYPE])
    yield http("framing/infer_patch", "PATCH", INFER, GOOD, [JSON_TYPE], status_only=True)


def _large() -> Iterator[Exchange]:
    count = 20_000
    head = f'{{"inputs": [{{"name": "INPUT0", "shape": [1, {count + 1}], "datatype": "INT32", "data": ['
    body = {
        "prefix_b64": base64_text(head.encode()),
        "fill_b64": base64_text(b"7,"),
        "count": count,
        "suffix_b64": base64_text(b"7]}]}"),
    }
    request = {"method": "POST", "path": INFER, "headers": [list(JSON_TYPE)], "body_gen": body}
    yield Exchange("http/large/twenty_thousand", "http", request)
    deep = {"prefix_b64": "", "fill_b64": base64_text(b"["), "count": 3000, "suffix_b64": ""}
    yield Exchange("http/large/unclosed_arrays", "http", request | {"body_gen": deep})
