"""The gRPC service: ModelInfer with contents of each type and raw, and ModelStreamInfer."""

from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import grpc, grpc_tensor, length_prefixed, model_infer, packed, request
from tests.triton.exam.encoded import PACKING
from tests.triton.records import Exchange, Json
from tests.triton.wire import base64_text

CONTENTS: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("bool_contents", [True, False]),
    "INT8": ("int_contents", [-128, 127]),
    "INT16": ("int_contents", [-32768, 32767]),
    "INT32": ("int_contents", [-2147483648, 2147483647]),
    "INT64": ("int64_contents", ["-9223372036854775808", "9223372036854775807"]),
    "UINT8": ("uint_contents", [0, 255]),
    "UINT16": ("uint_contents", [0, 65535]),
    "UINT32": ("uint_contents", [0, 4294967295]),
    "UINT64": ("uint64_contents", ["0", "18446744073709551615"]),
    "FP32": ("fp32_contents", [1.5, "Infinity"]),
    "FP64": ("fp64_contents", [-0.1, "NaN"]),
    "BYTES": ("bytes_contents", [base64_text(b"a"), base64_text(b"\xff\x00")]),
}
LEFT, RIGHT = grpc_tensor("INPUT0", "FP32", [1, 4]), grpc_tensor("INPUT1", "FP32", [1, 4])
RAW = (packed("f", 1, 2, 3, 4), packed("f", 10, 20, 30, 40))


def questions() -> Iterator[Exchange]:
    yield from _contents()
    yield from _raw()
    yield from _errors()
    yield from _parameters()
    yield from _outputs()
    yield from _streams()


def _typed(name: str, datatype: str, shape: list[int], kind: str, values: list[Any]) -> Json:
    return grpc_tensor(name, datatype, shape, contents={kind: values})


def _contents() -> Iterator[Exchange]:
    for datatype, (kind, values) in CONTENTS.items():
        name = "IN_STRING" if datatype == "BYTES" else f"IN_{datatype}"
        yield model_infer(f"contents/{datatype}", "alltypes", [_typed(name, datatype, [2], kind, values)])
    wrong: list[tuple[str, str, list[Any]]] = [
        ("INT32", "int64_contents", ["1"]),
        ("INT8", "int_contents", [300]),
        ("UINT8", "uint_contents", [300]),
    ]
    wrong += [("FP32", "fp64_contents", [1.5]), ("FP16", "fp32_contents", [1.5]), ("INT64", "int_contents", [1])]
    wrong += [("BOOL", "int_contents", [1]), ("UINT16", "int_contents", [1]), ("FP64", "fp32_contents", [1.5])]
    for datatype, kind, values in wrong:
        described = _typed(f"IN_{datatype}", datatype, [1], kind, values)
        yield model_infer(f"contents/{datatype}_as_{kind}", "alltypes", [described])
    two_kinds = grpc_tensor("IN_INT32", "INT32", [1], contents={"int_contents": [1], "int64_contents": ["2"]})
    yield model_infer("contents/two_kinds", "alltypes", [two_kinds])
    yield model_infer("contents/none", "alltypes", [grpc_tensor("IN_INT32", "INT32", [1])])
    yield model_infer("contents/empty_tensor", "alltypes", [grpc_tensor("IN_INT32", "INT32", [0])])
    yield model_infer("contents/too_many", "alltypes", [_typed("IN_INT32", "INT32", [1], "int_contents", [1, 2])])
    yield model_infer("contents/too_few", "alltypes", [_typed("IN_INT32", "INT32", [3], "int_contents", [1])])
    strings = [base64_text(b"a"), base64_text(b"b")]
    yield model_infer(
        "contents/bytes_too_many", "alltypes", [_typed("IN_STRING", "BYTES", [1], "bytes_contents", strings)]
    )
    yield model_infer("contents/bf16", "half", [_typed("X", "BF16", [1, 1], "fp32_contents", [1.5])])
    shout = _typed("TEXT", "BYTES", [1], "bytes_contents", [base64_text(b"hi")])
    yield model_infer("contents/shout", "shout", [shout])


def _raw() -> Iterator[Exchange]:
    for datatype, (code, values) in PACKING.items():
        described = grpc_tensor(f"IN_{datatype}", datatype, [2])
        yield model_infer(f"raw/{datatype}", "alltypes", [described], [packed(code, *values)])
    strings = grpc_tensor("IN_STRING", "BYTES", [2])
    yield model_infer("raw/BYTES", "alltypes", [strings], [length_prefixed(b"a", b"\xff")])
    yield model_infer("raw/BYTES_cut", "alltypes", [strings], [length_prefixed(b"a") + b"\x09\0\0\0b"])
    yield model_infer("raw/BYTES_one", "alltypes", [strings], [length_prefixed(b"a")])
    yield model_infer("raw/BF16", "half", [grpc_tensor("X", "BF16", [1, 2])], [b"\x80\x3f\x00\x40"])
    yield model_infer("raw/short", "add_sub", [LEFT, RIGHT], [RAW[0], RAW[1][:12]])
    yield model_infer("raw/long", "add_sub", [LEFT, RIGHT], [RAW[0], RAW[1] + b"\0"])
    yield model_infer("raw/one_of_two", "add_sub", [LEFT, RIGHT], RAW[:1])
    yield model_infer("raw/three_of_two", "add_sub", [LEFT, RIGHT], [*RAW, RAW[0]])
    mixed = _typed("INPUT1", "FP32", [1, 4], "fp32_contents", [1, 2, 3, 4])
    yield model_infer("raw/and_contents", "add_sub", [LEFT, mixed], RAW[:1])
    yield model_infer("raw/and_contents_both", "add_sub", [LEFT, mixed], RAW)
    yield model_infer("raw/empty_tensor", "identity", [grpc_tensor("INPUT0", "FP32", [0, 3])], [b""])
    yield model_infer("raw/ensemble", "ensemble_addsub", [LEFT | {"name": "A"}, RIGHT | {"name": "B"}], RAW, id="e")
    yield model_infer(
        "raw/version", "versioned", [grpc_tensor("INPUT0", "INT32", [1])], [packed("i", 1)], model_version="1"
    )
    rows = [grpc_tensor("FLAT", "INT32", [2, 4]), grpc_tensor("ONE", "INT32", [2, 1])]
    yield model_infer("raw/reshaped", "reshaped", rows, [packed("i", *range(8)), packed("i", 1, 2)])


def _errors() -> Iterator[Exchange]:
    asked: dict[str, Json] = {
        "no_model_name": request("", [LEFT, RIGHT], RAW),
        "unknown_model": request("nope", [LEFT, RIGHT], RAW),
        "unloaded_model": request("on_demand", [LEFT, RIGHT], RAW),
        "version_text": request("add_sub", [LEFT, RIGHT], RAW, model_version="x"),
        "missing_input": request("add_sub", [LEFT], RAW[:1]),
        "extra_input": request("add_sub", [LEFT, RIGHT, LEFT | {"name": "Q"}], [*RAW, RAW[0]]),
        "duplicate_input": request("add_sub", [LEFT, LEFT], RAW),
        "renamed_input": request("add_sub", [LEFT, RIGHT | {"name": "Q"}], RAW),
        "wrong_datatype": request("add_sub", [LEFT | {"datatype": "INT32"}, RIGHT], RAW),
        "unknown_datatype": request("add_sub", [LEFT | {"datatype": "FP99"}, RIGHT], RAW),
        "no_datatype": request("add_sub", [LEFT | {"datatype": ""}, RIGHT], RAW),
        "no_shape": request("add_sub", [LEFT | {"shape": []}, RIGHT], RAW),
        "negative_shape": request("add_sub", [LEFT | {"shape": ["-1", "4"]}, RIGHT], RAW),
        "batches_differ": request("add_sub", [LEFT | {"shape": ["2", "4"]}, RIGHT], [RAW[0] * 2, RAW[1]]),
        "batch_9": request("add_sub", [LEFT | {"shape": ["9", "4"]}, RIGHT | {"shape": ["9", "4"]}], [RAW[0] * 9] * 2),
        "decoupled": request("text_repeat", [grpc_tensor("text_input", "BYTES", [1])], [length_prefixed(b"a")]),
        "decoupled_ensemble": request(
            "ensemble_stream", [grpc_tensor("PROMPT", "BYTES", [1])], [length_prefixed(b"a")]
        ),
    }
    for name, message in asked.items():
        yield grpc(f"error/{name}", "ModelInfer", message | {"id": "q1"})
    code = grpc_tensor("CODE", "BYTES", [1])
    for kind in ("OK", "RAISE", "EMPTY", "PLAIN", "UNKNOWN", "INTERNAL", "NOT_FOUND", "INVALID_ARG", "UNAVAILABLE"):
        yield model_infer(f"model_error/{kind}", "error_model", [code], [length_prefixed(kind.encode())], id="m")
    for kind in ("UNSUPPORTED", "ALREADY_EXISTS", "CANCELLED"):
        yield model_infer(f"model_error/{kind}", "error_model", [code], [length_prefixed(kind.encode())])


def _parameters() -> Iterator[Exchange]:
    echo, one = [grpc_tensor("INPUT0", "INT32", [1])], [packed("i", 1)]
    asked: dict[str, Json] = {
        "each": {
            "b": {"bool_param": True},
            "i": {"int64_param": "-5"},
            "s": {"string_param": "x"},
            "d": {"double_param": 0.5},
            "u": {"uint64_param": "18446744073709551615"},
        },
        "unset": {"x": {}},
        "priority": {"priority": {"uint64_param": "1"}},
        "priority_int": {"priority": {"int64_param": "1"}},
        "priority_text": {"priority": {"string_param": "1"}},
        "timeout": {"timeout": {"int64_param": "5000000"}},
        "timeout_text": {"timeout": {"string_param": "5"}},
        "sequence": {
            "sequence_id": {"int64_param": "7"},
            "sequence_start": {"bool_param": True},
            "sequence_end": {"bool_param": True},
        },
        "sequence_text": {"sequence_id": {"string_param": "abc"}},
        "sequence_bool": {"sequence_id": {"bool_param": True}},
        "sequence_start_int": {"sequence_start": {"int64_param": "1"}},
        "headers_parameter": {"triton_foo": {"string_param": "x"}},
        "empty_final": {"triton_enable_empty_final_response": {"bool_param": True}},
        "binary_data_output": {"binary_data_output": {"bool_param": True}},
    }
    for name, parameters in asked.items():
        yield model_infer(f"params/{name}", "params_echo", echo, one, parameters=parameters, id="p")
    forwarded = [("x-fwd-user", "bob"), ("other", "z"), ("x-fwd-b", "2")]
    yield grpc("params/metadata", "ModelInfer", request("params_echo", echo, one), forwarded)
    described = grpc_tensor("INPUT0", "INT32", [1], parameters={"foo": {"int64_param": "1"}})
    yield model_infer("params/of_input", "params_echo", [described], one)


def _outputs() -> Iterator[Exchange]:
    asked: dict[str, list[Json]] = {
        "one": [{"name": "OUTPUT1"}],
        "twice": [{"name": "OUTPUT0"}, {"name": "OUTPUT0"}],
        "unnamed": [{}],
        "unknown": [{"name": "NOPE"}],
        "top_2": [{"name": "OUTPUT0", "parameters": {"classification": {"int64_param": "2"}}}],
        "top_0": [{"name": "OUTPUT0", "parameters": {"classification": {"int64_param": "0"}}}],
        "top_negative": [{"name": "OUTPUT0", "parameters": {"classification": {"int64_param": "-1"}}}],
        "top_text": [{"name": "OUTPUT0", "parameters": {"classification": {"string_param": "2"}}}],
        "top_9_unlabelled": [{"name": "OUTPUT1", "parameters": {"classification": {"int64_param": "9"}}}],
        "foreign_parameter": [{"name": "OUTPUT0", "parameters": {"foo": {"int64_param": "2"}}}],
        "binary_data": [{"name": "OUTPUT0", "parameters": {"binary_data": {"bool_param": False}}}],
    }
    for name, outputs in asked.items():
        yield model_infer(f"outputs/{name}", "add_sub", [LEFT, RIGHT], RAW, outputs=outputs)


def _words(text: str, count: int, identity: str, **members: Any) -> Json:
    described = [grpc_tensor("text_input", "BYTES", [1]), grpc_tensor("max_tokens", "INT32", [1])]
    return request(
        "text_repeat", described, [length_prefixed(text.encode()), packed("i", count)], id=identity, **members
    )


def _plan(text: str, identity: str, **members: Any) -> Json:
    return request(
        "trickle", [grpc_tensor("PLAN", "BYTES", [1, 1])], [length_prefixed(text.encode())], id=identity, **members
    )


def _streams() -> Iterator[Exchange]:
    final = {"parameters": {"triton_enable_empty_final_response": {"bool_param": True}}}
    sum_of = request("add_sub", [LEFT, RIGHT], RAW, id="a")
    asked: dict[str, list[Json]] = {
        "nothing": [],
        "plain": [sum_of],
        "plain_empty_final": [sum_of | final],
        "same_id_twice": [sum_of, sum_of],
        "words_3": [_words("a b c", 3, "w")],
        "words_3_empty_final": [_words("a b c", 3, "w", **final)],
        "words_0": [_words("a", 0, "z")],
        "words_0_empty_final": [_words("a", 0, "z", **final)],
        "words_no_id": [_words("a b", 2, "")],
        "words_error_first": [_words("ERR b", 2, "e")],
        "words_error_middle": [_words("a ERR c", 3, "e", **final)],
        "words_errors_only": [_words("ERR", 2, "e", **final)],
        "plan_final": [_plan("a final", "p")],
        "plan_final_flagged": [_plan("a final", "p", **final)],
        "plan_stop": [_plan("a stop", "p", **final)],
        "plan_empty": [_plan("a empty b", "p", **final)],
        "plan_nothing": [_plan("", "p", **final)],
        "empty_final_false": [
            _plan("a", "p", parameters={"triton_enable_empty_final_response": {"bool_param": False}})
        ],
        "empty_final_text": [_plan("a", "p", parameters={"triton_enable_empty_final_response": {"string_param": "x"}})],
        "one_output": [_words("a b", 2, "o", outputs=[{"name": "index"}])],
        "unknown_model": [sum_of | {"model_name": "nope", "id": "u"}],
        "unknown_version": [sum_of | {"model_version": "9"}],
        "unloaded_model": [sum_of | {"model_name": "on_demand"}],
        "wrong_shape": [request("add_sub", [LEFT | {"shape": ["1", "3"]}, RIGHT], [RAW[0][:12], RAW[1]], id="s")],
        "missing_input": [request("add_sub", [LEFT], RAW[:1], id="m")],
        "wrong_raw_count": [request("add_sub", [LEFT, RIGHT], RAW[:1], id="m")],
        "unknown_output": [sum_of | {"outputs": [{"name": "NOPE"}]}],
        "ensemble": [request("ensemble_addsub", [LEFT | {"name": "A"}, RIGHT | {"name": "B"}], RAW, id="e") | final],
    }
    for name, messages in asked.items():
        yield grpc(f"stream/{name}", "ModelStreamInfer", messages)
    code = [grpc_tensor("CODE", "BYTES", [1])]
    for kind in ("OK", "RAISE", "NOT_FOUND", "EMPTY"):
        message = request("error_model", code, [length_prefixed(kind.encode())], id=kind)
        yield grpc(f"stream/model_error_{kind}", "ModelStreamInfer", [message])
    for name, (prompt, count) in {
        "one": ("a", 1),
        "none": ("a", 0),
        "boom": ("boom", 1),
    }.items():
        described = [grpc_tensor("PROMPT", "BYTES", [1]), grpc_tensor("COUNT", "INT32", [1])]
        raw = [length_prefixed(prompt.encode()), packed("i", count)]
        message = request("ensemble_stream", described, raw, id=name)
        # Whether the final mark comes with the last answer or after it is chance.
        yield grpc(f"stream/ensemble_stream_{name}", "ModelStreamInfer", [message | final], status_only=name == "one")
    several = [_words(f"x{index}", 1, f"s{index}") for index in range(4)]
    yield grpc("stream/four_requests", "ModelStreamInfer", several)
    echo = request("params_echo", [grpc_tensor("INPUT0", "INT32", [1])], [packed("i", 1)], id="h")
    yield grpc("stream/metadata", "ModelStreamInfer", [echo], [("x-fwd-user", "bob")])
