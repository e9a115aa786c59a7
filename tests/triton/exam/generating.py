"""generate and generate_stream: how the object becomes tensors and parameters, and how answers and errors come back."""

from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import JSON_TYPE, get, post
from tests.triton.records import Exchange

ONCE: dict[str, Any] = {
    "plain": {"text_input": "hello"},
    "with_id": {"text_input": "a", "id": "x1"},
    "id_empty": {"text_input": "a", "id": ""},
    "id_number": {"text_input": "a", "id": 5},
    "id_null": {"text_input": "a", "id": None},
    "max_tokens": {"text_input": "a", "max_tokens": 3},
    "max_tokens_array": {"text_input": "a", "max_tokens": [3]},
    "max_tokens_nested": {"text_input": "a", "max_tokens": [[3]]},
    "max_tokens_text": {"text_input": "a", "max_tokens": "3"},
    "max_tokens_bool": {"text_input": "a", "max_tokens": True},
    "max_tokens_null": {"text_input": "a", "max_tokens": None},
    "max_tokens_object": {"text_input": "a", "max_tokens": {"a": 1}},
    "max_tokens_overflow": {"text_input": "a", "max_tokens": 4294967297},
    "max_tokens_two": {"text_input": "a", "max_tokens": [3, 4]},
    "text_array": {"text_input": ["a"]},
    "text_two": {"text_input": ["a", "b"]},
    "text_nested": {"text_input": [["a"], ["b"]]},
    "text_empty": {"text_input": ""},
    "text_empty_array": {"text_input": []},
    "text_null": {"text_input": None},
    "text_number": {"text_input": 5},
    "text_bool": {"text_input": True},
    "text_object": {"text_input": {"a": 1}},
    "text_mixed": {"text_input": ["a", 1]},
    "missing": {"max_tokens": 3},
    "nothing": {},
    "extra_int": {"text_input": "a", "n": 7},
    "extra_negative": {"text_input": "a", "n": -7},
    "extra_large": {"text_input": "a", "n": 9223372036854775808},
    "extra_bool": {"text_input": "a", "b": True},
    "extra_text": {"text_input": "a", "s": "x"},
    "extra_double": {"text_input": "a", "d": 0.5},
    "extra_null": {"text_input": "a", "x": None},
    "extra_array": {"text_input": "a", "x": [1]},
    "extra_empty_array": {"text_input": "a", "x": []},
    "extra_object": {"text_input": "a", "x": {"y": 1}},
    "parameters": {"text_input": "a", "parameters": {"n": 1, "s": "x", "b": False}},
    "parameters_empty": {"text_input": "a", "parameters": {}},
    "parameters_text": {"text_input": "a", "parameters": "x"},
    "parameters_array": {"text_input": "a", "parameters": [1]},
    "parameters_null": {"text_input": "a", "parameters": None},
    "parameters_nested": {"text_input": "a", "parameters": {"x": {"y": 1}}},
    "parameters_double": {"text_input": "a", "parameters": {"temperature": 0.7}},
    "parameters_input": {"text_input": "a", "parameters": {"max_tokens": 2}},
    "parameters_both": {"text_input": "a", "n": 1, "parameters": {"n": 2}},
    "sequence": {"text_input": "a", "sequence_id": 3, "sequence_start": True, "sequence_end": True},
    "priority_timeout": {"text_input": "a", "priority": 1, "timeout": 1000000},
    "binary_output": {"text_input": "a", "binary_data_output": True},
    "stream_unknown": {"text_input": "a", "stream": True},
    "model_name": {"text_input": "a", "model_name": "x"},
    "unicode": {"text_input": "é漢😀", "é": "ü"},
}
REPEAT: dict[str, Any] = {
    "one": {"text_input": "a b", "max_tokens": 1},
    "default": {"text_input": "a b"},
    "three": {"text_input": "a b c", "max_tokens": 3, "id": "r3"},
    "none": {"text_input": "a", "max_tokens": 0},
    "negative": {"text_input": "a", "max_tokens": -1},
    "error_first": {"text_input": "ERR b", "max_tokens": 2},
    "error_only": {"text_input": "ERR", "max_tokens": 1},
    "error_middle": {"text_input": "a ERR c", "max_tokens": 3},
    "error_last": {"text_input": "a ERR", "max_tokens": 2},
    "errors_only": {"text_input": "ERR", "max_tokens": 3},
    "stream_false": {"text_input": "a b", "max_tokens": 2, "stream": False},
    "stream_number": {"text_input": "a", "stream": 1},
    "text_array": {"text_input": ["a b"], "max_tokens": [1]},
    "two_texts": {"text_input": ["a", "b"]},
    "twenty": {"text_input": "w", "max_tokens": 20},
    "empty_final": {"text_input": "a", "max_tokens": 1, "triton_enable_empty_final_response": True},
}
PLANS = {
    "final": "a final",
    "final_only": "final",
    "stop": "a stop",
    "stop_only": "stop",
    "empty": "a empty b",
    "empty_only": "empty",
    "nothing": "",
    "fail_then_final": "fail final",
    "two": "a b",
}
DOCUMENTS = {
    "empty": "",
    "array": "[]",
    "text": '"a"',
    "number": "5",
    "null": "null",
    "truncated": '{"text_input": "a"',
    "trailing": '{"text_input": "a"} x',
    "duplicate": '{"text_input": "a", "text_input": "b"}',
    "duplicate_parameter": '{"text_input": "a", "n": 1, "n": 2}',
    "nan": '{"text_input": "a", "n": NaN}',
    "byte_order_mark": '\ufeff{"text_input": "a"}',
    "comment": '{"text_input": "a" /* x */}',
}


def questions() -> Iterator[Exchange]:
    for route in ("generate", "generate_stream"):
        yield from _asked(route)
        yield from _addressed(route)


def _asked(route: str) -> Iterator[Exchange]:
    once, repeat, trickle = (f"/v2/models/{model}/{route}" for model in ("text_once", "text_repeat", "trickle"))
    for name, body in ONCE.items():
        yield post(f"{route}/once_{name}", once, body)
    for name, body in REPEAT.items():
        yield post(f"{route}/repeat_{name}", repeat, body)
    for name, plan in PLANS.items():
        yield post(f"{route}/plan_{name}", trickle, {"PLAN": plan, "id": "p"})
    for name, text in DOCUMENTS.items():
        yield post(f"{route}/json_{name}", once, text)


def _addressed(route: str) -> Iterator[Exchange]:
    text = {"text_input": "a"}
    for model in ("nope", "on_demand", "text_once/versions/1", "text_once/versions/2", "text_once/versions/x"):
        yield post(f"{route}/model_{model.replace('/', '_')}", f"/v2/models/{model}/{route}", text)
    yield get(f"{route}/get", f"/v2/models/text_once/{route}")
    yield post(f"{route}/no_content_type", f"/v2/models/text_once/{route}", text, [])
    yield post(f"{route}/headers", f"/v2/models/text_once/{route}", text, [("x-fwd-user", "bob"), JSON_TYPE])
    asked: dict[str, tuple[str, Any]] = {
        "ensemble_stream_3": ("ensemble_stream", {"PROMPT": "a b c", "COUNT": 3}),
        "ensemble_stream_1": ("ensemble_stream", {"PROMPT": "a", "COUNT": 1, "id": "e1"}),
        "ensemble_stream_0": ("ensemble_stream", {"PROMPT": "a", "COUNT": 0}),
        "ensemble_stream_error": ("ensemble_stream", {"PROMPT": "ERR", "COUNT": 1}),
        "ensemble_stream_second_fails": ("ensemble_stream", {"PROMPT": "boom", "COUNT": 1}),
        "ensemble_missing": ("ensemble_stream", {"PROMPT": "a"}),
        "shout": ("shout", {"TEXT": "a"}),
        "shout_fails": ("shout", {"TEXT": "boom"}),
        "error_raise": ("error_model", {"CODE": "RAISE"}),
        "error_empty": ("error_model", {"CODE": "EMPTY"}),
        "error_unavailable": ("error_model", {"CODE": "UNAVAILABLE"}),
        "add_sub": ("add_sub", {"INPUT0": [1, 2, 3, 4], "INPUT1": [1, 1, 1, 1]}),
        "add_sub_two_rows": ("add_sub", {"INPUT0": [1] * 8, "INPUT1": [1] * 8}),
        "add_sub_short": ("add_sub", {"INPUT0": [1, 2], "INPUT1": [1, 1]}),
        "identity": ("identity", {"INPUT0": [[1.5, 2], [3, 4]]}),
        "identity_int32": ("identity_int32", {"INPUT0": [1, 2]}),
        "alltypes_numbers": (
            "alltypes",
            {"IN_INT8": 5, "IN_FP64": 0.5, "IN_UINT64": 18446744073709551615, "IN_BOOL": True},
        ),
        "alltypes_arrays": ("alltypes", {"IN_INT64": [1, 2], "IN_STRING": ["x", "y"], "IN_FP32": [0.1]}),
        "alltypes_fp16": ("alltypes", {"IN_FP16": 1.5}),
        "alltypes_overflow": ("alltypes", {"IN_INT8": 300}),
        "versioned": ("versioned", {"INPUT0": 1}),
        "reshaped": ("reshaped", {"FLAT": [1, 2, 3, 4], "ONE": 5}),
        "echo": ("params_echo", {"INPUT0": 1, "a": "x", "id": "i"}),
        "cached": ("cached_square", {"X": [2, 3]}),
        "sequence": ("sequence_accum", {"INPUT": 5, "sequence_id": 900, "sequence_start": True, "sequence_end": True}),
        "sequence_without_id": ("sequence_accum", {"INPUT": 5}),
    }
    for name, (model, body) in asked.items():
        yield post(f"{route}/{name}", f"/v2/models/{model}/{route}", body)
