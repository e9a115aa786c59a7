"""Inference over HTTP with JSON tensors: values, shapes, outputs asked for, parameters, ids."""

from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import JSON_TYPE, add_sub_inputs, infer, inputs, int32, tensor
from tests.triton.records import Exchange

LIMITS: dict[str, list[Any]] = {
    "UINT8": [0, 255],
    "UINT16": [0, 65535],
    "UINT32": [0, 4294967295],
    "UINT64": [0, 18446744073709551615],
    "INT8": [-128, 127],
    "INT16": [-32768, 32767],
    "INT32": [-2147483648, 2147483647],
    "INT64": [-9223372036854775808, 9223372036854775807],
}


def questions() -> Iterator[Exchange]:
    yield from _datatypes()
    yield from _values()
    yield from _shapes()
    yield from _bytes()
    yield from _outputs()
    yield from _parameters()
    yield from _requests()


def _one(datatype: str, data: Any, shape: Any = None) -> dict[str, Any]:
    kind = "STRING" if datatype == "BYTES" else datatype
    return inputs(tensor(f"IN_{kind}", datatype, shape or [len(data)], data))


def _datatypes() -> Iterator[Exchange]:
    for datatype, limits in LIMITS.items():
        yield infer(f"infer/{datatype.lower()}", "alltypes", _one(datatype, [*limits, 1]))
        yield infer(f"infer/{datatype.lower()}_float", "alltypes", _one(datatype, [1.0]))
        yield infer(f"infer/{datatype.lower()}_text", "alltypes", _one(datatype, ["1"]))
        yield infer(f"infer/{datatype.lower()}_bool", "alltypes", _one(datatype, [True]))
        yield infer(f"infer/{datatype.lower()}_huge", "alltypes", _one(datatype, [99999999999999999999999]))
    yield infer("infer/bool", "alltypes", _one("BOOL", [True, False]))
    yield infer("infer/bool_int", "alltypes", _one("BOOL", [1, 0]))
    yield infer("infer/bool_text", "alltypes", _one("BOOL", ["true"]))
    yield infer("infer/fp32", "alltypes", _one("FP32", [0.1, -0.0, 1e-45, 3.4028234663852886e38]))
    yield infer("infer/fp64", "alltypes", _one("FP64", [0.1, 1e308, 5e-324, -1.5, 123456789.123456789]))
    yield infer("infer/fp64_int", "alltypes", _one("FP64", [1, -2, 9007199254740993]))
    yield infer("infer/fp64_text", "alltypes", _one("FP64", ["1.5"]))
    yield infer("infer/fp16", "alltypes", _one("FP16", [1.5]))
    yield infer("infer/bf16", "half", inputs(tensor("X", "BF16", [1, 1], [1.5])))
    yield infer("infer/bytes", "alltypes", _one("BYTES", ["a", "", "é漢😀"]))
    every = [_one(datatype, limits)["inputs"][0] for datatype, limits in LIMITS.items()]
    every += [_one("FP64", [0.25])["inputs"][0], _one("BYTES", ["x", "y"])["inputs"][0]]
    yield infer("infer/every_type", "alltypes", inputs(*every))
    yield infer("infer/no_optional_input", "alltypes", inputs())


def _identity(text: str) -> str:
    return '{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "FP32", "data": [' + text + "]}]}"


def _values() -> Iterator[Exchange]:
    spelled = {
        "nan": "NaN",
        "infinity": "Infinity",
        "minus_infinity": "-Infinity",
        "inf": "inf",
        "nan_text": '"NaN"',
        "exponent": "1e3",
        "exponent_plus": "1E+3",
        "huge_exponent": "1e400",
        "minus_zero": "-0",
        "leading_zero": "01",
        "leading_plus": "+1",
        "bare_point": ".5",
        "trailing_point": "5.",
        "hexadecimal": "0x10",
        "underscore": "1_000",
        "trailing_comma": "1,",
        "digits": "1." + "1234567890" * 10,
        "object": "{}",
        "nested_too_deep": "[[[[1]]]]",
        "comment": "1 /* one */",
        "single_quotes": "'1'",
    }
    for name, text in spelled.items():
        yield infer(f"infer/fp32_{name}", "identity", _identity(text))
    yield infer("infer/int32_exponent", "identity_int32", int32([1e2]))
    yield infer("infer/int32_fraction", "identity_int32", int32([1.5]))
    yield infer("infer/int32_null", "identity_int32", int32([None]))
    yield infer("infer/int32_wraps", "identity_int32", int32([2147483648]))
    yield infer("infer/int32_mixed", "identity_int32", int32([1, "2", 3]))


def _shaped(shape: Any, data: Any, **members: Any) -> dict[str, Any]:
    return inputs(tensor("INPUT0", "INT32", shape, data, **members))


def _shapes() -> Iterator[Exchange]:
    asked: dict[str, tuple[Any, Any]] = {
        "flat": ([2, 3], [1, 2, 3, 4, 5, 6]),
        "nested": ([2, 3], [[1, 2, 3], [4, 5, 6]]),
        "nested_transposed": ([2, 3], [[1, 2], [3, 4], [5, 6]]),
        "nested_ragged": ([2, 3], [[1, 2, 3, 4], [5, 6]]),
        "nested_mixed": ([2, 2], [1, [2, 3], 4]),
        "nested_deeper": ([2, 2], [[[1], [2]], [[3], [4]]]),
        "nested_empty_lists": ([1, 2], [[], [1, 2], []]),
        "scalar_data": ([1, 1], 5),
        "empty_rows": ([0, 3], []),
        "empty_columns": ([3, 0], []),
        "empty_nested": ([2, 0], [[], []]),
        "empty_with_data": ([0, 3], [1]),
        "too_many": ([1, 2], [1, 2, 3]),
        "too_few": ([1, 4], [1, 2, 3]),
        "rank_one": ([4], [1, 2, 3, 4]),
        "rank_three": ([1, 2, 2], [1, 2, 3, 4]),
        "no_rank": ([], [1]),
        "negative": ([-1, 2], [1, 2]),
        "negative_both": ([-1, -2], [1, 2]),
        "fraction": ([1.0, 2], [1, 2]),
        "text": (["1", 2], [1, 2]),
        "null": (None, [1, 2]),
        "above_int64": ([18446744073709551616, 1], [1]),
        "nested_shape": ([[1, 2]], [1, 2]),
    }
    for name, (shape, data) in asked.items():
        yield infer(f"shape/{name}", "identity_int32", _shaped(shape, data))
    yield infer("shape/reshaped", "reshaped", inputs(*_reshaped(1)))
    yield infer("shape/reshaped_batch", "reshaped", inputs(*_reshaped(3)))
    flat = tensor("FLAT", "INT32", [1, 2, 2], [1, 2, 3, 4])
    yield infer("shape/reshaped_as_the_model_sees_it", "reshaped", inputs(flat, *_reshaped(1)[1:]))
    yield infer("shape/ragged", "ragged", inputs(tensor("X", "INT32", [2, 3], [1, 2, 3, 4, 5, 6])))
    yield infer("shape/ragged_batch_5", "ragged", inputs(tensor("X", "INT32", [5, 1], [1, 2, 3, 4, 5])))
    yield infer("shape/autoconf", "autoconf", inputs(tensor("IN", "INT64", [2, 2], [1, 2, 3, 4])))
    yield infer("shape/autoconf_batch_3", "autoconf", inputs(tensor("IN", "INT64", [3, 1], [1, 2, 3])))
    yield infer("shape/batch_0", "add_sub", add_sub_inputs(0))
    yield infer("shape/batch_9", "add_sub", add_sub_inputs(9))
    yield infer("shape/batch_3", "add_sub", add_sub_inputs(3))


def _reshaped(rows: int) -> list[dict[str, Any]]:
    flat = list(range(4 * rows))
    return [tensor("FLAT", "INT32", [rows, 4], flat), tensor("ONE", "INT32", [rows, 1], [100] * rows)]


def _bytes() -> Iterator[Exchange]:
    def strings(text: str) -> str:
        return '{"inputs": [{"name": "INPUT0", "shape": [1, 1], "datatype": "BYTES", "data": [' + text + "]}]}"

    spelled = {
        "control": r'"\u0000\u0001\t\n\r\b\f"',
        "escapes": r'"\"\\\/"',
        "surrogate_pair": r'"\ud83d\ude00"',
        "lone_surrogate": r'"\ud83d"',
        "delete_and_nbsp": '"\x7f\u00a0\u2028"',
        "raw_newline": '"a\nb"',
        "raw_tab": '"a\tb"',
        "bad_escape": r'"\x41"',
        "empty": '""',
        "number": "1",
        "null": "null",
        "unterminated": '"abc',
        "nested": '["a"]',
        "slash": '"</script>"',
    }
    for name, text in spelled.items():
        yield infer(f"bytes/{name}", "identity_bytes", strings(text))
    raw = strings('"X"').encode()
    yield infer("bytes/not_utf8", "identity_bytes", raw.replace(b'"X"', b'"\xff\xfe"'))
    yield infer("bytes/truncated_utf8", "identity_bytes", raw.replace(b'"X"', b'"\xe6\xbc"'))


def _outputs() -> Iterator[Exchange]:
    asked: dict[str, Any] = {
        "one": [{"name": "OUTPUT1"}],
        "reversed": [{"name": "OUTPUT1"}, {"name": "OUTPUT0"}],
        "twice": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}],
        "empty": [],
        "null": None,
        "object": {"name": "OUTPUT0"},
        "of_strings": ["OUTPUT0"],
        "no_name": [{}],
        "name_number": [{"name": 5}],
        "name_empty": [{"name": ""}],
        "unknown": [{"name": "OUTPUT0"}, {"name": "NOPE"}],
        "parameters_empty": [{"name": "OUTPUT0", "parameters": {}}],
        "parameters_array": [{"name": "OUTPUT0", "parameters": []}],
        "parameter_unknown": [{"name": "OUTPUT0", "parameters": {"foo": 1}}],
        "extra_member": [{"name": "OUTPUT0", "foo": 1}],
        "binary_data": [{"name": "OUTPUT0", "parameters": {"binary_data": True}}],
        "binary_data_last": [{"name": "OUTPUT1", "parameters": {"binary_data": True}}],
        "binary_data_false": [{"name": "OUTPUT0", "parameters": {"binary_data": False}}],
        "binary_data_int": [{"name": "OUTPUT0", "parameters": {"binary_data": 1}}],
        "binary_data_text": [{"name": "OUTPUT0", "parameters": {"binary_data": "true"}}],
        "binary_data_twice": [
            {"name": "OUTPUT0", "parameters": {"binary_data": True}},
            {"name": "OUTPUT0", "parameters": {"binary_data": False}},
        ],
    }
    for name, outputs in asked.items():
        yield infer(f"outputs/{name}", "add_sub", add_sub_inputs(outputs=outputs))
    for name, value in {"true": True, "false": False, "int": 1, "text": "true", "null": None}.items():
        body = add_sub_inputs(parameters={"binary_data_output": value})
        yield infer(f"outputs/binary_data_output_{name}", "add_sub", body)
    body = int32([7], parameters={"binary_data_output": True}, outputs=[{"name": "OUTPUT0"}])
    yield infer("outputs/binary_data_output_named", "identity_int32", body)


def _parameters() -> Iterator[Exchange]:
    asked: dict[str, Any] = {
        "int": {"n": 1},
        "int_negative": {"n": -1},
        "int_64": {"n": 9223372036854775807},
        "int_above_64": {"n": 9223372036854775808},
        "bool": {"b": True},
        "text": {"s": "x", "t": ""},
        "double": {"d": 1.5},
        "double_whole": {"d": 2.0},
        "null": {"x": None},
        "object": {"o": {"a": 1}},
        "many": {"a": 1, "b": "two", "c": False},
        "empty": {},
        "text_instead": "x",
        "array_instead": [1],
        "number_instead": 5,
        "priority": {"priority": 1},
        "priority_negative": {"priority": -1},
        "priority_text": {"priority": "1"},
        "timeout": {"timeout": 5000000},
        "timeout_negative": {"timeout": -5},
        "timeout_double": {"timeout": 1.5},
        "sequence_id": {"sequence_id": 42},
        "sequence_id_text": {"sequence_id": "abc"},
        "sequence_id_empty": {"sequence_id": ""},
        "sequence_id_negative": {"sequence_id": -1},
        "sequence_id_bool": {"sequence_id": True},
        "sequence_flags": {"sequence_id": 1, "sequence_start": True, "sequence_end": True},
        "sequence_flags_false": {"sequence_id": 1, "sequence_start": False, "sequence_end": False},
        "sequence_start_int": {"sequence_start": 1},
        "sequence_end_text": {"sequence_end": "true"},
        "sequence_flags_without_id": {"sequence_start": True},
        "binary_data_output": {"binary_data_output": False},
        "binary_data_size": {"binary_data_size": 4},
        "triton_reserved": {"triton_foo": 1},
        "triton_empty_final": {"triton_enable_empty_final_response": True},
        "headers_reserved": {"x-fwd-user": "json"},
        "unicode": {"é": "漢"},
    }
    echo = tensor("INPUT0", "INT32", [1], [1])
    for name, parameters in asked.items():
        yield infer(f"params/{name}", "params_echo", inputs(echo, parameters=parameters))
    duplicated = '{"inputs": [{"name": "INPUT0", "shape": [1], "datatype": "INT32", "data": [1]}], "parameters": %s}'
    yield infer("params/duplicate_key", "params_echo", duplicated % '{"a": 1, "a": 2}')
    for name, identity in {"text": "abc", "empty": "", "unicode": "é", "null": None, "bool": True}.items():
        yield infer(f"params/id_{name}", "params_echo", inputs(echo, id=identity))
    yield infer("params/id_long", "params_echo", inputs(echo, id="x" * 300))
    wanted = inputs(echo, outputs=[{"name": "PARAMS", "parameters": {"foo": 1}}])
    yield infer("params/output_parameter", "params_echo", wanted)
    forwarded = {
        "header_twice": [("x-fwd-a", "1"), ("x-fwd-a", "2")],
        "header_empty": [("x-fwd-a", "")],
        "header_prefix_only": [("x-fwd-", "1")],
        "header_infix": [("a-x-fwd-b", "1")],
        "header_number": [("x-fwd-n", "12")],
    }
    for name, headers in forwarded.items():
        yield infer(f"params/{name}", "params_echo", inputs(echo), [*headers, JSON_TYPE])
    both = inputs(echo, parameters={"x-fwd-a": "body", "n": 1})
    yield infer("params/header_and_body", "params_echo", both, [("x-fwd-a", "header"), JSON_TYPE])


def _requests() -> Iterator[Exchange]:
    for version in ("1", "2", "3", "abc", "-1", "0"):
        body = inputs(tensor("INPUT0", "INT32", [1], [1]))
        yield infer(f"version/{version}", f"versioned/versions/{version}", body)
    yield infer("version/latest", "versioned", inputs(tensor("INPUT0", "INT32", [1], [1])))
    yield infer("ensemble/plain", "ensemble_addsub", _letters([1, 4], [1, 2, 3, 4]))
    yield infer("ensemble/batch_2", "ensemble_addsub", _letters([2, 4], list(range(8)), id="e"))
    yield infer("ensemble/batch_9", "ensemble_addsub", _letters([9, 4], [0] * 36))
    yield infer("ensemble/wrong_shape", "ensemble_addsub", _letters([1, 3], [1, 2, 3]))
    yield infer("ensemble/one_output", "ensemble_addsub", _letters([1, 4], [1, 2, 3, 4], outputs=[{"name": "TWICE_B"}]))
    yield infer("ensemble/inner_output", "ensemble_addsub", _letters([1, 4], [1, 2, 3, 4], outputs=[{"name": "sum"}]))
    yield infer("ensemble/missing_input", "ensemble_addsub", inputs(tensor("A", "FP32", [1, 4], [1, 2, 3, 4])))
    yield infer("ensemble/parameters", "ensemble_addsub", _letters([1, 4], [1, 2, 3, 4], parameters={"a": 1, "b": "x"}))
    yield infer("ensemble/decoupled", "ensemble_stream", inputs(tensor("PROMPT", "BYTES", [1], ["a"])))
    for code in ("OK", "RAISE", "EMPTY", "PLAIN", "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE"):
        yield infer(f"model_error/{code}", "error_model", inputs(tensor("CODE", "BYTES", [1], [code])))
    for code in ("UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED", "NO_SUCH_CODE"):
        yield infer(f"model_error/{code}", "error_model", inputs(tensor("CODE", "BYTES", [1], [code]), id="7"))
    yield infer("model_error/shout", "shout", inputs(tensor("TEXT", "BYTES", [1], ["boom"])))


def _letters(shape: list[int], data: list[int], **members: Any) -> dict[str, Any]:
    return inputs(tensor("A", "FP32", shape, data), tensor("B", "FP32", shape, data), **members)
