"""Binary tensors, raw binary requests, compression and classification over HTTP."""

import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import (
    JSON_TYPE,
    add_sub_inputs,
    binary,
    binary_infer,
    encode,
    infer,
    inputs,
    int32,
    length_prefixed,
    packed,
    post,
    sized,
    tensor,
)
from tests.triton.records import Exchange, Json

PACKING: dict[str, tuple[str, list[Any]]] = {
    "BOOL": ("?", [1, 0]),
    "UINT8": ("B", [0, 255]),
    "UINT16": ("H", [0, 65535]),
    "UINT32": ("I", [0, 4294967295]),
    "UINT64": ("Q", [0, 18446744073709551615]),
    "INT8": ("b", [-128, 127]),
    "INT16": ("h", [-32768, 32767]),
    "INT32": ("i", [-2147483648, 2147483647]),
    "INT64": ("q", [-9223372036854775808, 9223372036854775807]),
    "FP16": ("e", [1.5, -0.25]),
    "FP32": ("f", [1.5, float("inf")]),
    "FP64": ("d", [-0.1, float("nan")]),
}
AS_BINARY = {"binary_data_output": True}


def questions() -> Iterator[Exchange]:
    yield from _datatypes()
    yield from _sizes()
    yield from _header_lengths()
    yield from _byte_strings()
    yield from _raw()
    yield from _encodings()
    yield from _classification()


def _datatypes() -> Iterator[Exchange]:
    for datatype, (code, values) in PACKING.items():
        data = packed(code, *values)
        header = inputs(sized(f"IN_{datatype}", datatype, [2], len(data)))
        name = datatype.lower()
        if datatype != "FP16":
            yield binary_infer(f"binary/in_{name}", "alltypes", header, data)
        yield binary_infer(f"binary/both_{name}", "alltypes", header | {"parameters": AS_BINARY}, data)
    yield binary_infer("binary/in_fp16", "alltypes", inputs(sized("IN_FP16", "FP16", [1], 2)), packed("e", 1.5))
    half = inputs(sized("X", "BF16", [1, 2], 4), parameters=AS_BINARY)
    yield binary_infer("binary/both_bf16", "half", half, b"\x80\x3f\x00\x40")
    yield binary_infer("binary/in_bf16", "half", inputs(sized("X", "BF16", [1, 2], 4)), b"\x80\x3f\x00\x40")
    yield infer("binary/out_fp32", "add_sub", add_sub_inputs(parameters=AS_BINARY))
    yield infer("binary/out_empty", "identity_int32", int32([], parameters=AS_BINARY))
    for value in (0, 2, 255):
        header = inputs(sized("IN_BOOL", "BOOL", [1], 1))
        yield binary_infer(f"binary/bool_byte_{value}", "alltypes", header, bytes([value]))
    many = inputs(
        sized("IN_INT8", "INT8", [3], 3), sized("IN_STRING", "BYTES", [2], 11), sized("IN_UINT8", "UINT8", [1], 1)
    )
    data = b"\x01\x02\x03" + length_prefixed(b"a", b"\xff\x00") + b"\x09"
    yield binary_infer("binary/three_inputs", "alltypes", many | {"parameters": AS_BINARY}, data)


def _sizes() -> Iterator[Exchange]:
    four = packed("i", 1, 2, 3, 4)
    asked: dict[str, tuple[Json, bytes]] = {
        "exact": (sized("INPUT0", "INT32", [2, 2], 16), four),
        "data_short": (sized("INPUT0", "INT32", [2, 2], 16), four[:10]),
        "data_absent": (sized("INPUT0", "INT32", [2, 2], 16), b""),
        "data_long": (sized("INPUT0", "INT32", [2, 2], 16), four + b"\0"),
        "size_small": (sized("INPUT0", "INT32", [2, 2], 12), four[:12]),
        "size_small_data_exact": (sized("INPUT0", "INT32", [2, 2], 12), four),
        "size_zero": (sized("INPUT0", "INT32", [2, 2], 0), b""),
        "size_negative": (sized("INPUT0", "INT32", [2, 2], -16), four),
        "size_text": (sized("INPUT0", "INT32", [2, 2], "16"), four),
        "size_fraction": (sized("INPUT0", "INT32", [2, 2], 16.0), four),
        "size_null": (sized("INPUT0", "INT32", [2, 2], None), four),
        "size_huge": (sized("INPUT0", "INT32", [2, 2], 2**62), four),
        "size_above_int64": (sized("INPUT0", "INT32", [2, 2], 2**64), four),
        "also_data": (sized("INPUT0", "INT32", [2, 2], 16) | {"data": [9, 8, 7, 6]}, four),
        "no_size": (tensor("INPUT0", "INT32", [2, 2]), four),
        "data_and_bytes": (tensor("INPUT0", "INT32", [2, 2], [1, 2, 3, 4]), four),
        "negative_shape": (sized("INPUT0", "INT32", [-1, 2], 16), four),
    }
    for name, (described, data) in asked.items():
        yield binary_infer(f"binary/{name}", "identity_int32", inputs(described), data)
    also_shared = sized("INPUT0", "INT32", [2, 2], 16, shared_memory_region="nope", shared_memory_byte_size=16)
    yield binary_infer("binary/size_and_shared_memory", "identity_int32", inputs(also_shared), four)
    two = inputs(sized("INPUT0", "FP32", [1, 4], 16), sized("INPUT1", "FP32", [1, 4], 16))
    yield binary_infer("binary/second_input_short", "add_sub", two, packed("f", 1, 2, 3, 4, 5))


def _header_lengths() -> Iterator[Exchange]:
    header = inputs(sized("INPUT0", "INT32", [1, 1], 4))
    size, data = len(json.dumps(header)), packed("i", 5)
    lengths = {
        "one_short": size - 1,
        "one_long": size + 1,
        "whole_body": size + 4,
        "past_body": size + 5,
        "huge": 10**12,
        "above_int64": 10**20,
        "plus": f"+{size}",
        "spaces": f" {size} ",
        "fraction": f"{size}.0",
        "trailing_text": f"{size}x",
        "hexadecimal": hex(size),
        "empty": "",
    }
    for name, length in lengths.items():
        yield binary_infer(f"header_length/{name}", "identity_int32", header, data, header_length=length)
    good = encode(int32([1]))
    yield infer(
        "header_length/json_only", "identity_int32", good, [("Inference-Header-Content-Length", str(len(good)))]
    )
    yield infer("header_length/absent", "identity_int32", json.dumps(header).encode() + data)


def _byte_strings() -> Iterator[Exchange]:
    asked = {
        "good": ([1, 2], length_prefixed(b"ab", b"")),
        "binary_zero": ([1, 1], length_prefixed(b"\0\xff\0")),
        "too_many": ([1, 1], length_prefixed(b"a", b"b")),
        "too_few": ([1, 3], length_prefixed(b"a", b"b")),
        "prefix_cut": ([1, 2], length_prefixed(b"a") + b"\x01\x00"),
        "prefix_past_end": ([1, 1], b"\xff\xff\xff\x7f" + b"a"),
        "prefix_negative": ([1, 1], b"\xff\xff\xff\xff"),
        "no_bytes": ([1, 1], b""),
        "no_elements": ([0, 1], b""),
    }
    for name, (shape, data) in asked.items():
        header = inputs(sized("INPUT0", "BYTES", shape, len(data)), parameters=AS_BINARY)
        yield binary_infer(f"binary_bytes/{name}", "identity_bytes", header, data)


def _raw() -> Iterator[Exchange]:
    def raw(name: str, model: str, data: bytes, length: str = "0") -> Exchange:
        return infer(f"raw/{name}", model, data, [("Inference-Header-Content-Length", length)])

    yield raw("int32_dynamic_rank_two", "identity_int32", packed("i", 1, 2))
    yield raw("versioned", "versioned", packed("i", 1, 2))
    yield raw("versioned_2", "versioned/versions/1", packed("i", 1, 2))
    yield raw("empty", "versioned", b"")
    yield raw("not_multiple", "versioned", b"\1\2\3")
    yield raw("bytes", "shout", b"hello")
    yield raw("bytes_prefixed", "shout", length_prefixed(b"hello"))
    yield raw("bytes_batch", "misbehave", b"")
    yield raw("fixed", "params_echo", packed("i", 1))
    yield raw("fixed_too_long", "params_echo", packed("i", 1, 2))
    yield raw("batching", "cached_square", packed("d", 3.0, 4.0))
    yield raw("batching_two_rows", "cached_square", packed("d", 3.0, 4.0, 5.0, 6.0))
    yield raw("ragged", "ragged", packed("i", 1, 2, 3))
    yield raw("decoupled", "trickle", b"a b")
    yield raw("many_inputs", "alltypes", b"\1")
    yield raw("ensemble", "ensemble_addsub", packed("f", 1, 2, 3, 4))
    yield raw("unknown_model", "nope", packed("i", 1))
    yield raw("json_body", "versioned", encode(int32([1, 2])))


def _encodings() -> Iterator[Exchange]:
    body = encode(int32([1, 2, 3]))
    zipped, deflated = gzip.compress(body, mtime=0), zlib.compress(body)
    raw_deflate = zlib.compressobj(wbits=-15)
    bare = raw_deflate.compress(body) + raw_deflate.flush()
    asked = {
        "gzip": ("gzip", zipped),
        "deflate": ("deflate", deflated),
        "deflate_raw": ("deflate", bare),
        "deflate_as_gzip": ("gzip", deflated),
        "gzip_as_deflate": ("deflate", zipped),
        "gzip_plain": ("gzip", body),
        "gzip_truncated": ("gzip", zipped[:-12]),
        "gzip_broken": ("gzip", zipped[:12] + b"\xff\xff\xff" + zipped[15:]),
        "gzip_bad_checksum": ("gzip", zipped[:-8] + b"\0" * 8),
        "gzip_empty": ("gzip", b""),
        "gzip_trailing": ("gzip", zipped + b"xx"),
        "gzip_two_members": ("gzip", gzip.compress(body[:9], mtime=0) + gzip.compress(body[9:], mtime=0)),
        "gzip_uppercase": ("GZIP", zipped),
        "x_gzip": ("x-gzip", zipped),
        "identity": ("identity", body),
        "brotli": ("br", body),
        "unknown": ("foo", body),
        "empty": ("", body),
        "both": ("gzip, deflate", zlib.compress(zipped)),
    }
    for name, (encoding, sent) in asked.items():
        yield infer(f"request_coding/{name}", "identity_int32", sent, [("Content-Encoding", encoding), JSON_TYPE])
    header = inputs(sized("INPUT0", "INT32", [1, 1], 4), parameters=AS_BINARY)
    whole, headers = binary(header, packed("i", 5))
    yield infer(
        "request_coding/binary",
        "identity_int32",
        gzip.compress(whole, mtime=0),
        [*headers, ("Content-Encoding", "gzip")],
    )
    generate = gzip.compress(b'{"text_input": "zip"}', mtime=0)
    coded = [("Content-Encoding", "gzip"), JSON_TYPE]
    yield post("request_coding/generate", "/v2/models/text_once/generate", generate, coded)
    yield post("request_coding/index", "/v2/repository/index", gzip.compress(b"{}", mtime=0), coded, status_only=True)
    yield from _accepted(body)


def _accepted(body: bytes) -> Iterator[Exchange]:
    asked = {
        "gzip": "gzip",
        "deflate": "deflate",
        "both": "gzip, deflate",
        "both_reversed": "deflate, gzip",
        "preferred": "gzip;q=0.2, deflate;q=0.8",
        "refused": "gzip;q=0",
        "any": "*",
        "any_weighted": "gzip;q=0.1, *;q=0.9",
        "identity": "identity",
        "identity_refused": "identity;q=0",
        "brotli": "br",
        "brotli_or_gzip": "br, gzip;q=0.5",
        "uppercase": "GZIP",
        "empty": "",
        "broken": ";;,q=x",
        "many": "gzip,deflate,br,zstd",
    }
    for name, accepted in asked.items():
        yield infer(f"accept/{name}", "identity_int32", body, [("Accept-Encoding", accepted), JSON_TYPE])
    gzip_wanted = ("Accept-Encoding", "gzip")
    yield infer("accept/binary", "add_sub", add_sub_inputs(parameters=AS_BINARY), [gzip_wanted, JSON_TYPE])
    yield infer("accept/error", "add_sub", inputs(), [gzip_wanted, JSON_TYPE])
    yield infer("accept/model_error", "error_model", inputs(tensor("CODE", "BYTES", [1], ["PLAIN"])), [gzip_wanted])
    text = {"text_input": "a b", "max_tokens": 2}
    yield post("accept/generate", "/v2/models/text_once/generate", {"text_input": "a"}, [gzip_wanted, JSON_TYPE])
    yield post("accept/generate_stream", "/v2/models/text_repeat/generate_stream", text, [gzip_wanted, JSON_TYPE])


def _top(count: Any, name: str = "OUTPUT0", **parameters: Any) -> list[Json]:
    return [{"name": name, "parameters": {"classification": count, **parameters}}]


def _classification() -> Iterator[Exchange]:
    counts = {
        "1": 1,
        "2": 2,
        "all": 4,
        "over": 9,
        "0": 0,
        "negative": -1,
        "text": "2",
        "fraction": 2.0,
        "bool": True,
        "null": None,
    }
    for name, count in counts.items():
        yield infer(f"class/top_{name}", "add_sub", add_sub_inputs(outputs=_top(count)))
    yield infer("class/unlabelled", "add_sub", add_sub_inputs(outputs=_top(4, "OUTPUT1")))
    yield infer("class/batch_3", "add_sub", add_sub_inputs(3, outputs=_top(2)))
    both = _top(1) + _top(2, "OUTPUT1")
    yield infer("class/both", "add_sub", add_sub_inputs(outputs=both))
    yield infer("class/with_plain", "add_sub", add_sub_inputs(outputs=[*_top(1), {"name": "OUTPUT1"}]))
    yield infer("class/binary", "add_sub", add_sub_inputs(outputs=_top(3, binary_data=True)))
    yield infer("class/binary_output", "add_sub", add_sub_inputs(outputs=_top(2), parameters=AS_BINARY))
    yield infer("class/int32_rank_two", "identity_int32", int32([3, -1, 9], outputs=_top(2)))
    rows = tensor("INPUT0", "INT32", [2, 3], [3, -1, 9, 1, 2, 0])
    yield infer("class/int32_two_rows", "identity_int32", inputs(rows, outputs=_top(5)))
    for datatype, (code, _) in PACKING.items():
        data = packed(code, 1, 0) if datatype == "BOOL" else packed(code, 1, 3, 2)
        count = 2 if datatype == "BOOL" else 3
        described = sized(f"IN_{datatype}", datatype, [count], len(data))
        header = inputs(described, outputs=_top(2, f"OUT_{datatype}"))
        yield binary_infer(f"class/{datatype.lower()}", "alltypes", header, data)
    special = tensor("INPUT0", "FP32", [1, 4], [1e30, -0.0, 1e-30, 123456.789])
    yield infer("class/fp32_digits", "identity", inputs(special, outputs=_top(4)))
    double = tensor("IN_FP64", "FP64", [3], [0.1, 1e300, -2.5])
    yield infer("class/fp64_digits", "alltypes", inputs(double, outputs=_top(3, "OUT_FP64")))
    letters = [tensor(name, "FP32", [1, 4], [1, 5, 2, 3]) for name in "AB"]
    yield infer("class/ensemble", "ensemble_addsub", inputs(*letters, outputs=_top(2, "TWICE_A")))
