"""State between exchanges: sequences, the response cache, statistics, shared memory, settings."""

from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import (
    JSON_TYPE,
    add_sub_inputs,
    get,
    grpc,
    grpc_tensor,
    http,
    infer,
    inputs,
    length_prefixed,
    local,
    model_infer,
    packed,
    pause,
    post,
    request,
    tensor,
)
from tests.triton.records import Exchange, Json
from tests.triton.wire import base64_text


def questions() -> Iterator[Exchange]:
    yield from _sequences()
    yield from _sequences_over_grpc()
    yield from _cache()
    yield from _system_shared_memory()
    yield from _shared_memory_over_grpc()
    yield from _cuda_shared_memory()
    yield from _logging()
    yield from _trace()


def _step(name: str, value: int, **parameters: Any) -> Exchange:
    body = inputs(tensor("INPUT", "INT32", [1, 1], [value]), parameters=parameters)
    return infer(f"sequence/{name}", "sequence_accum", body)


def _word(name: str, word: str, **parameters: Any) -> Exchange:
    body = inputs(tensor("WORD", "BYTES", [1, 1], [word]), parameters=parameters)
    return infer(f"sequence_text/{name}", "sequence_text", body)


def _sequences() -> Iterator[Exchange]:
    yield _step("without_id", 1)
    yield _step("id_zero", 1, sequence_id=0, sequence_start=True)
    yield _step("not_started", 1, sequence_id=11)
    yield _step("start", 1, sequence_id=11, sequence_start=True)
    yield _step("second_starts", 100, sequence_id=12, sequence_start=True)
    yield _step("middle", 2, sequence_id=11)
    yield _step("restart", 5, sequence_id=11, sequence_start=True)
    yield _step("end", 3, sequence_id=11, sequence_end=True)
    yield _step("after_end", 3, sequence_id=11)
    yield _step("second_ends", 200, sequence_id=12, sequence_end=True)
    yield _step("start_and_end", 9, sequence_id=13, sequence_start=True, sequence_end=True)
    yield _step("negative_id", 9, sequence_id=-3, sequence_start=True, sequence_end=True)
    yield _step("flags_as_int", 9, sequence_id=16, sequence_start=1)
    two_rows = inputs(tensor("INPUT", "INT32", [2, 1], [1, 2]), parameters={"sequence_id": 17, "sequence_start": True})
    yield infer("sequence/two_rows", "sequence_accum", two_rows)
    given = tensor("START", "INT32", [1, 1], [1])
    body = inputs(tensor("INPUT", "INT32", [1, 1], [1]), given, parameters={"sequence_id": 18, "sequence_start": True})
    yield infer("sequence/control_input_given", "sequence_accum", body)
    # The real server pads a text id with empty strings, which its own Python backend refuses: only a full one passes.
    full = "x" * 128
    yield _word("not_started", "one", sequence_id="anna")
    yield _word("start", "one", sequence_id=full, sequence_start=True)
    yield _word("middle", "two", sequence_id=full)
    yield _word("end", "three", sequence_id=full, sequence_end=True)
    yield _word("ended", "four", sequence_id=full)
    yield _word("empty", "one", sequence_id="", sequence_start=True)
    yield _word("long", "one", sequence_id="x" * 129, sequence_start=True, sequence_end=True)


def _sequence_request(value: int, **parameters: Json) -> Json:
    described = [grpc_tensor("INPUT", "INT32", [1, 1])]
    return request("sequence_accum", described, [packed("i", value)], parameters=parameters)


def _sequences_over_grpc() -> Iterator[Exchange]:
    identity, yes = {"int64_param": "21"}, {"bool_param": True}
    yield grpc("sequence/without_id", "ModelInfer", _sequence_request(1))
    yield grpc("sequence/start", "ModelInfer", _sequence_request(1, sequence_id=identity, sequence_start=yes))
    yield grpc("sequence/middle", "ModelInfer", _sequence_request(2, sequence_id=identity))
    unsigned = {"uint64_param": "21"}
    yield grpc("sequence/middle_unsigned", "ModelInfer", _sequence_request(2, sequence_id=unsigned))
    yield grpc("sequence/end", "ModelInfer", _sequence_request(3, sequence_id=identity, sequence_end=yes))
    yield grpc("sequence/ended", "ModelInfer", _sequence_request(3, sequence_id=identity))
    steps = [
        _sequence_request(1, sequence_id=identity, sequence_start=yes),
        _sequence_request(2, sequence_id=identity),
        _sequence_request(3, sequence_id=identity, sequence_end=yes),
        _sequence_request(4, sequence_id=identity),
    ]
    yield grpc("sequence/one_stream", "ModelStreamInfer", steps[:3])
    yield grpc("sequence/one_stream_then_ended", "ModelStreamInfer", [steps[3]])


def _cache() -> Iterator[Exchange]:
    for name, values in {"miss": [2.0, 3.0], "hit": [2.0, 3.0], "other": [4.0, 5.0]}.items():
        yield infer(f"cache/{name}", "cached_square", inputs(tensor("X", "FP64", [1, 2], values)))
    yield infer("cache/hit_with_id", "cached_square", inputs(tensor("X", "FP64", [1, 2], [2.0, 3.0]), id="again"))
    yield infer("cache/batch_2", "cached_square", inputs(tensor("X", "FP64", [2, 2], [2.0, 3.0, 4.0, 5.0])))
    raw = [packed("d", 2.0, 3.0)]
    yield model_infer("cache/hit", "cached_square", [grpc_tensor("X", "FP64", [1, 2])], raw)
    yield pause("cache/settle", 0.3)
    yield get("statistics/cached", "/v2/models/cached_square/stats")


def _register(name: str, region: str, body: Any) -> Exchange:
    return post(f"shm/{name}", f"/v2/systemsharedmemory/region/{region}/register", body)


def _from_shared(name: str, source: Json, target: Json | None = None, shape: tuple[int, int] = (1, 4)) -> Exchange:
    described = tensor("INPUT0", "INT32", list(shape), parameters=source)
    wanted = {"outputs": [{"name": "OUTPUT0", "parameters": target}]} if target else {}
    return infer(f"shm/{name}", "identity_int32", inputs(described, **wanted))


def _region(name: str, size: Any, **others: Any) -> Json:
    return {"shared_memory_region": name, "shared_memory_byte_size": size} | {
        f"shared_memory_{key}": value for key, value in others.items()
    }


def _system_shared_memory() -> Iterator[Exchange]:
    status = "/v2/systemsharedmemory/status"
    yield get("shm/status_none", status)
    yield local("shm/create", "shm_create", key="/exam_in", size=64, data_b64=base64_text(packed("i", *range(1, 17))))
    yield local("shm/create_out", "shm_create", key="/exam_out", size=64)
    yield _register("register", "in", {"key": "/exam_in", "offset": 0, "byte_size": 64})
    yield _register("register_twice", "in", {"key": "/exam_in", "offset": 0, "byte_size": 64})
    yield _register("register_twice_other_size", "in", {"key": "/exam_in", "byte_size": 32})
    yield _register("register_out", "out", {"key": "/exam_out", "byte_size": 64})
    yield _register("register_without_slash", "in2", {"key": "exam_in", "byte_size": 16})
    wrong: dict[str, Any] = {
        "no_such_key": {"key": "/exam_nope", "byte_size": 16},
        "too_large": {"key": "/exam_in", "byte_size": 65},
        "offset_negative": {"key": "/exam_in", "offset": -1, "byte_size": 8},
        "size_zero": {"key": "/exam_in", "byte_size": 0},
        "size_negative": {"key": "/exam_in", "byte_size": -1},
        "size_text": {"key": "/exam_in", "byte_size": "16"},
        "size_missing": {"key": "/exam_in"},
        "key_missing": {"byte_size": 16},
        "key_number": {"key": 5, "byte_size": 16},
        "key_empty": {"key": "", "byte_size": 16},
        "key_path": {"key": "/../etc/passwd", "byte_size": 16},
        "empty_object": {},
        "array": [],
    }
    for name, body in wrong.items():
        yield _register(f"register_{name}", f"wrong_{name}", body)
    yield _register("register_no_body", "wrong_no_body", "")
    yield _register("register_malformed", "wrong_malformed", "{")
    yield get("shm/status_all", status)
    yield get("shm/status_one", "/v2/systemsharedmemory/region/in/status")
    yield get("shm/status_unknown", "/v2/systemsharedmemory/region/nope/status")
    yield from _shared_inference()
    yield post("shm/unregister_one", "/v2/systemsharedmemory/region/in2/unregister")
    yield post("shm/unregister_again", "/v2/systemsharedmemory/region/in2/unregister")
    yield get("shm/status_after_one", status)
    yield post("shm/unregister_all", "/v2/systemsharedmemory/unregister")
    yield get("shm/status_after_all", status)
    yield _from_shared("in_unregistered", _region("in", 16))
    yield local("shm/unlink", "shm_unlink", key="/exam_in")
    yield local("shm/unlink_out", "shm_unlink", key="/exam_out")


def _shared_inference() -> Iterator[Exchange]:
    yield _from_shared("in", _region("in", 16))
    yield _from_shared("in_offset", _region("in", 16, offset=48))
    yield _from_shared("in_offset_text", _region("in", 16, offset="16"))
    yield _from_shared("in_past_end", _region("in", 16, offset=52))
    yield _from_shared("in_offset_far", _region("in", 16, offset=640))
    yield _from_shared("in_offset_negative", _region("in", 16, offset=-4))
    yield _from_shared("in_too_short", _region("in", 12))
    yield _from_shared("in_too_long", _region("in", 20))
    yield _from_shared("in_size_zero", _region("in", 0))
    yield _from_shared("in_size_missing", {"shared_memory_region": "in"})
    yield _from_shared("in_size_text", _region("in", "16"))
    yield _from_shared("in_unknown_region", _region("nope", 16))
    yield _from_shared("in_region_number", {"shared_memory_region": 5, "shared_memory_byte_size": 16})
    data_too = tensor("INPUT0", "INT32", [1, 4], [9, 9, 9, 9], parameters=_region("in", 16))
    yield infer("shm/in_and_data", "identity_int32", inputs(data_too))
    yield _from_shared("out", _region("in", 16), _region("out", 16))
    yield local("shm/out_read", "shm_read", key="/exam_out", size=16)
    yield _from_shared("out_offset", _region("in", 16, offset=16), _region("out", 16, offset=32))
    yield local("shm/out_offset_read", "shm_read", key="/exam_out", offset=32, size=16)
    yield _from_shared("out_larger", _region("in", 16), _region("out", 32))
    yield _from_shared("out_too_small", _region("in", 16), _region("out", 12))
    yield _from_shared("out_past_end", _region("in", 16), _region("out", 16, offset=56))
    yield _from_shared("out_unknown_region", _region("in", 16), _region("nope", 16))
    yield _from_shared("out_size_missing", _region("in", 16), {"shared_memory_region": "out"})
    yield _from_shared("out_and_binary", _region("in", 16), _region("out", 16) | {"binary_data": True})
    yield _from_shared("out_and_class", _region("in", 16), _region("out", 64) | {"classification": 2})
    yield _from_shared("in_two_rows", _region("in", 32), _region("out", 32), (2, 4))
    yield from _shared_strings()


def _shared_strings() -> Iterator[Exchange]:
    data = length_prefixed(b"shared", b"\xff\0")
    yield local("shm/create_text", "shm_create", key="/exam_text", size=64, data_b64=base64_text(data))
    yield _register("register_text", "text", {"key": "/exam_text", "byte_size": 64})
    described = tensor("INPUT0", "BYTES", [1, 2], parameters=_region("text", len(data)))
    target = [{"name": "OUTPUT0", "parameters": _region("text", 32, offset=32)}]
    yield infer("shm/strings", "identity_bytes", inputs(described, outputs=target))
    yield local("shm/strings_read", "shm_read", key="/exam_text", offset=32, size=len(data))
    longer = tensor("INPUT0", "BYTES", [1, 2], parameters=_region("text", 64))
    yield infer("shm/strings_and_padding", "identity_bytes", inputs(longer))
    yield local("shm/unlink_text", "shm_unlink", key="/exam_text")


def _shared_memory_over_grpc() -> Iterator[Exchange]:
    yield local(
        "shm/create_grpc", "shm_create", key="/exam_grpc", size=32, data_b64=base64_text(packed("i", 5, 6, 7, 8))
    )
    described = {"name": "g", "key": "/exam_grpc", "byte_size": "32"}
    yield grpc("shm/register", "SystemSharedMemoryRegister", described)
    yield grpc("shm/register_twice", "SystemSharedMemoryRegister", described)
    yield grpc("shm/register_no_key", "SystemSharedMemoryRegister", {"name": "h", "byte_size": "32"})
    yield grpc("shm/register_no_name", "SystemSharedMemoryRegister", {"key": "/exam_grpc", "byte_size": "32"})
    yield grpc("shm/register_large", "SystemSharedMemoryRegister", described | {"name": "i", "byte_size": "33"})
    yield grpc("shm/status", "SystemSharedMemoryStatus")
    yield grpc("shm/status_one", "SystemSharedMemoryStatus", {"name": "g"})
    yield grpc("shm/status_unknown", "SystemSharedMemoryStatus", {"name": "nope"})

    def shared(size: int, region: str = "g", offset: int | None = None) -> Json:
        parameters = {
            "shared_memory_region": {"string_param": region},
            "shared_memory_byte_size": {"int64_param": str(size)},
        }
        return parameters | ({} if offset is None else {"shared_memory_offset": {"int64_param": str(offset)}})

    def through(name: str, source: Json, target: Json | None = None) -> Exchange:
        outputs = [{"name": "OUTPUT0", "parameters": target}] if target else []
        described = grpc_tensor("INPUT0", "INT32", [1, 4], parameters=source)
        return model_infer(f"shm/{name}", "identity_int32", [described], outputs=outputs)

    yield through("in", shared(16))
    yield through("in_out", shared(16), shared(16, offset=16))
    yield local("shm/grpc_read", "shm_read", key="/exam_grpc", offset=16, size=16)
    yield through("in_unknown", shared(16, "nope"))
    yield through("in_past_end", shared(16, offset=20))
    yield through("out_too_small", shared(16), shared(8))
    yield grpc("shm/unregister", "SystemSharedMemoryUnregister", {"name": "g"})
    yield grpc("shm/unregister_unknown", "SystemSharedMemoryUnregister", {"name": "nope"})
    yield grpc("shm/unregister_all", "SystemSharedMemoryUnregister")
    yield local("shm/unlink_grpc", "shm_unlink", key="/exam_grpc")


def _cuda_shared_memory() -> Iterator[Exchange]:
    yield get("cuda/status", "/v2/cudasharedmemory/status")
    yield get("cuda/status_unknown", "/v2/cudasharedmemory/region/nope/status")
    handle = {"raw_handle": {"b64": base64_text(b"\0" * 64)}, "device_id": 0, "byte_size": 16}
    register = "/v2/cudasharedmemory/region/r/register"
    yield post("cuda/register", register, handle)
    yield post("cuda/register_no_handle", register, {"device_id": 0, "byte_size": 16})
    yield post("cuda/register_short_handle", register, handle | {"raw_handle": {"b64": "AAAA"}})
    yield post("cuda/unregister_one", "/v2/cudasharedmemory/region/r/unregister")
    yield post("cuda/unregister_all", "/v2/cudasharedmemory/unregister")
    yield grpc("cuda/status", "CudaSharedMemoryStatus")
    yield grpc("cuda/status_unknown", "CudaSharedMemoryStatus", {"name": "nope"})
    described = {"name": "r", "raw_handle": base64_text(b"\0" * 64), "byte_size": "16"}
    yield grpc("cuda/register", "CudaSharedMemoryRegister", described)
    yield grpc("cuda/unregister", "CudaSharedMemoryUnregister", {"name": "r"})
    yield grpc("cuda/unregister_all", "CudaSharedMemoryUnregister")


def _logging() -> Iterator[Exchange]:
    yield get("logging/defaults", "/v2/logging")
    changes: dict[str, Any] = {
        "info_off": {"log_info": False},
        "verbose": {"log_verbose_level": 1},
        "verbose_off": {"log_verbose_level": 0},
        "format": {"log_format": "ISO8601"},
        "format_default": {"log_format": "default"},
        "format_unknown": {"log_format": "xml"},
        "info_text": {"log_info": "true"},
        "info_number": {"log_info": 1},
        "verbose_text": {"log_verbose_level": "1"},
        "verbose_negative": {"log_verbose_level": -1},
        "file": {"log_file": "other.log"},
        "file_empty": {"log_file": ""},
        "unknown": {"log_nope": True},
        "good_and_unknown": {"log_info": True, "log_nope": True},
        "empty": {},
        "array": [],
    }
    for name, body in changes.items():
        yield post(f"logging/{name}", "/v2/logging", body)
    yield post("logging/no_body", "/v2/logging")
    yield post("logging/malformed", "/v2/logging", "{")
    yield post("logging/all", "/v2/logging", {"log_info": True, "log_warning": True, "log_error": True})
    yield grpc("logging/get", "LogSettings")
    yield grpc("logging/set", "LogSettings", {"settings": {"log_warning": {"bool_param": False}}})
    yield grpc("logging/set_back", "LogSettings", {"settings": {"log_warning": {"bool_param": True}}})
    yield grpc("logging/verbose", "LogSettings", {"settings": {"log_verbose_level": {"uint32_param": 0}}})
    yield grpc("logging/wrong_type", "LogSettings", {"settings": {"log_info": {"string_param": "true"}}})
    yield grpc("logging/format_unknown", "LogSettings", {"settings": {"log_format": {"string_param": "xml"}}})
    yield grpc("logging/unknown", "LogSettings", {"settings": {"log_nope": {"bool_param": True}}})


def _trace() -> Iterator[Exchange]:
    every, one = "/v2/trace/setting", "/v2/models/identity/trace/setting"
    yield get("trace/defaults", every)
    yield get("trace/model_defaults", one)
    yield get("trace/model_unknown", "/v2/models/nope/trace/setting")
    changes: dict[str, Any] = {
        "rate": {"trace_rate": "5"},
        "rate_number": {"trace_rate": 5},
        "rate_text": {"trace_rate": "x"},
        "rate_array": {"trace_rate": ["5"]},
        "count": {"trace_count": "10"},
        "count_unlimited": {"trace_count": "-1"},
        "count_negative": {"trace_count": "-2"},
        "log_frequency": {"log_frequency": "3"},
        "level_array": {"trace_level": ["OFF"]},
        "level_text": {"trace_level": "OFF"},
        "level_unknown": {"trace_level": ["NOPE"]},
        "mode": {"trace_mode": "opentelemetry"},
        "file": {"trace_file": "trace.json"},
        "unknown": {"trace_nope": "1"},
        "clear": {"trace_rate": None, "trace_count": None, "log_frequency": None, "trace_level": None},
        "empty": {},
        "array": [],
    }
    for name, body in changes.items():
        yield post(f"trace/{name}", every, body)
    yield post("trace/malformed", every, "{")
    of_model: dict[str, Json] = {"rate": {"trace_rate": "7"}, "clear": {"trace_rate": None}, "unknown": {"nope": "1"}}
    for name, body in of_model.items():
        yield post(f"trace/model_set_{name}", one, body)
        yield get(f"trace/model_after_{name}", one)
    yield post("trace/model_unknown_set", "/v2/models/nope/trace/setting", {"trace_rate": "7"})
    yield http("trace/model_put", "PUT", one, "{}", [JSON_TYPE])
    yield grpc("trace/get", "TraceSetting")
    yield grpc("trace/model_get", "TraceSetting", {"model_name": "identity"})
    yield grpc("trace/model_unknown", "TraceSetting", {"model_name": "nope"})
    settings: dict[str, Json] = {
        "rate": {"trace_rate": {"value": ["9"]}},
        "clear": {"trace_rate": {}},
        "two_values": {"trace_rate": {"value": ["9", "10"]}},
        "bad_value": {"trace_rate": {"value": ["x"]}},
        "unknown": {"nope": {"value": ["1"]}},
    }
    for name, values in settings.items():
        yield grpc(f"trace/{name}", "TraceSetting", {"settings": values})
    yield get("trace/at_the_end", every)
    yield infer("trace/still_infers", "add_sub", add_sub_inputs())
