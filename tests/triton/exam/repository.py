"""Statistics, the repository's index, loading and unloading. Comes last: it changes what is served."""

import json
from collections.abc import Iterator
from typing import Any

from tests.triton.exam.ask import Body, get, grpc, grpc_tensor, infer, inputs, model_infer, packed, pause, post, tensor
from tests.triton.records import Exchange, Json
from tests.triton.wire import base64_text

ECHO = b"""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(pb_utils.get_input_tensor_by_name(request, "INPUT0").as_numpy()) for request in requests]

    def answer(self, array):
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("OUTPUT0", array)])
"""
INPUT = {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}
OUTPUT = {"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}
CONFIG: Json = {"backend": "python", "input": [INPUT], "output": [OUTPUT]}
SETTLE_S = 0.6


def questions() -> Iterator[Exchange]:
    yield from _statistics()
    yield from _index("start")
    yield from _load_and_unload()
    yield from _overrides()
    yield from _invalid_configs()
    yield from _ensembles()
    yield from _over_grpc()
    yield from _failed_load()


def _load(name: str, model: str, body: Body = "{}") -> Exchange:
    return post(f"load/{name}", f"/v2/repository/models/{model}/load", body)


def _unload(name: str, model: str, body: Body = "{}") -> Iterator[Exchange]:
    yield post(f"unload/{name}", f"/v2/repository/models/{model}/unload", body)
    yield pause(f"unload/{name}", SETTLE_S)


def _index(when: str) -> Iterator[Exchange]:
    yield post(f"index/{when}", "/v2/repository/index", "{}")


def _statistics() -> Iterator[Exchange]:
    yield pause("statistics/settle", SETTLE_S)
    for model in ("identity", "add_sub", "error_model", "text_repeat", "trickle", "ensemble_addsub", "ensemble_stream"):
        yield get(f"statistics/{model}", f"/v2/models/{model}/stats")
        yield grpc(f"statistics/{model}", "ModelStatistics", {"name": model})
    for path in (
        "versioned",
        "versioned/versions/1",
        "versioned/versions/3",
        "versioned/versions/x",
        "nope",
        "on_demand",
    ):
        yield get(f"statistics/{path.replace('/', '_')}", f"/v2/models/{path}/stats")
    yield get("statistics/all", "/v2/models/stats")
    yield grpc("statistics/all", "ModelStatistics")
    yield grpc("statistics/version", "ModelStatistics", {"name": "versioned", "version": "2"})
    yield grpc("statistics/unknown", "ModelStatistics", {"name": "nope"})
    yield grpc("statistics/bad_version", "ModelStatistics", {"name": "versioned", "version": "x"})
    yield grpc("statistics/version_alone", "ModelStatistics", {"version": "1"})


def _load_and_unload() -> Iterator[Exchange]:
    bodies: dict[str, Any] = {
        "empty": "",
        "ready": {"ready": True},
        "not_ready": {"ready": False},
        "ready_text": {"ready": "true"},
        "unknown_member": {"foo": 1},
        "array": [],
        "malformed": "{",
        "repository": {"repository_name": "x"},
    }
    for name, body in bodies.items():
        yield post(f"index/{name}", "/v2/repository/index", body)
    yield grpc("index/all", "RepositoryIndex")
    yield grpc("index/ready", "RepositoryIndex", {"ready": True})
    yield grpc("index/named", "RepositoryIndex", {"repository_name": "x"})
    one = inputs(tensor("INPUT0", "INT32", [1], [1]))
    yield _load("on_demand", "on_demand")
    yield infer("load/on_demand_infer", "on_demand", one)
    yield get("load/on_demand_ready", "/v2/models/on_demand/ready")
    yield _load("again", "on_demand")
    yield _load("no_body", "on_demand", "")
    yield _load("malformed", "on_demand", "{")
    yield _load("array", "on_demand", "[]")
    yield _load("parameters_array", "on_demand", {"parameters": []})
    yield _load("parameter_unknown", "on_demand", {"parameters": {"foo": "x"}})
    yield _load("parameter_number", "on_demand", {"parameters": {"foo": 1}})
    yield _load("unknown", "nope")
    yield post("load/in_named_repository", "/v2/repository/x/models/on_demand/load", "{}")
    yield get("load/health_after_unknown", "/v2/health/ready")
    yield from _unload("on_demand", "on_demand")
    yield infer("unload/infer", "on_demand", one)
    yield get("unload/ready", "/v2/models/on_demand/ready")
    yield get("unload/metadata", "/v2/models/on_demand")
    yield get("unload/config", "/v2/models/on_demand/config")
    yield get("unload/stats", "/v2/models/on_demand/stats")
    raw = [packed("i", 1)]
    yield model_infer("unload/infer", "on_demand", [grpc_tensor("INPUT0", "INT32", [1])], raw)
    yield grpc("unload/ready", "ModelReady", {"name": "on_demand"})
    yield from _index("after_unload")
    yield from _unload("again", "on_demand")
    yield from _unload("unknown", "nope")
    yield from _unload("malformed", "on_demand", "{")
    yield from _unload("no_body", "on_demand", "")
    yield get("unload/health", "/v2/health/ready")


def _override(config: Any, files: dict[str, bytes] | None = None) -> Json:
    text = config if isinstance(config, str) else json.dumps(config)
    contents = {f"file:{path}": base64_text(data) for path, data in (files or {}).items()}
    return {"parameters": {"config": text, **contents}}


def _overrides() -> Iterator[Exchange]:
    renamed = CONFIG | {"max_batch_size": 2, "input": [INPUT | {"dims": [2]}], "output": [OUTPUT | {"dims": [2]}]}
    yield _load("config", "on_demand", _override(renamed))
    yield get("load/config_then_config", "/v2/models/on_demand/config")
    yield get("load/config_then_metadata", "/v2/models/on_demand")
    yield infer("load/config_then_infer", "on_demand", inputs(tensor("INPUT0", "INT32", [1, 2], [1, 2])))
    yield _load("plain_after_config", "on_demand")
    yield get("load/plain_then_config", "/v2/models/on_demand/config")
    yield _load("file", "on_demand", _override(CONFIG, {"1/model.py": ECHO, "7/model.py": ECHO}))
    yield get("load/file_then_metadata", "/v2/models/on_demand")
    yield infer("load/file_then_infer", "on_demand/versions/7", inputs(tensor("INPUT0", "INT32", [1], [1])))
    yield _load("file_new_model", "made_up", _override(CONFIG, {"3/model.py": ECHO}))
    yield infer("load/file_new_model_infer", "made_up", inputs(tensor("INPUT0", "INT32", [1], [1])))
    yield from _index("with_new_model")
    yield from _unload("made_up", "made_up")
    yield _load("new_model_gone", "made_up")
    yield _load("file_without_config", "on_demand", {"parameters": {"file:1/model.py": base64_text(ECHO)}})
    yield _load("config_number", "on_demand", {"parameters": {"config": 5}})
    yield from _unload("overridden", "on_demand")


def _invalid_configs() -> Iterator[Exchange]:
    asked: dict[str, Any] = {
        "not_json": "{nope",
        "empty_text": "",
        "array": "[]",
        "other_name": CONFIG | {"name": "other"},
        "unknown_backend": CONFIG | {"backend": "nope"},
        "unknown_platform": {"platform": "nope", "input": [INPUT], "output": [OUTPUT]},
        "unknown_member": CONFIG | {"nope": 1},
        "wrong_type": CONFIG | {"max_batch_size": "x"},
        "negative_batch": CONFIG | {"max_batch_size": -1},
        "no_dims": CONFIG | {"input": [{"name": "INPUT0", "data_type": "TYPE_INT32"}]},
        "zero_dim": CONFIG | {"input": [INPUT | {"dims": [0]}]},
        "no_datatype": CONFIG | {"input": [{"name": "INPUT0", "dims": [1]}]},
        "unknown_datatype": CONFIG | {"input": [INPUT | {"data_type": "TYPE_NOPE"}]},
        "no_name": CONFIG | {"output": [{"data_type": "TYPE_INT32", "dims": [1]}]},
        "reshape_size": CONFIG | {"input": [INPUT | {"dims": [2], "reshape": {"shape": [3]}}]},
        "no_versions": CONFIG | {"version_policy": {"specific": {"versions": [9]}}},
        "gpu": CONFIG | {"instance_group": [{"kind": "KIND_GPU"}]},
        "preferred_too_large": CONFIG | {"max_batch_size": 2, "dynamic_batching": {"preferred_batch_size": [4]}},
        "two_schedulers": CONFIG | {"max_batch_size": 2, "dynamic_batching": {}, "sequence_batching": {}},
        "decoupled_cache": CONFIG
        | {"model_transaction_policy": {"decoupled": True}, "response_cache": {"enable": True}},
        "priority_range": CONFIG | {"max_batch_size": 2, "dynamic_batching": {"priority_levels": 2}},
        "no_inputs": {"backend": "python", "output": [OUTPUT]},
    }
    for name, config in asked.items():
        yield _load(f"invalid/{name}", f"invalid_{name}", _override(config, {"1/model.py": ECHO}))
    programs = {
        "syntax": b"x = = 1",
        "no_class": b"x = 1",
        "import": b"import no_such_module",
        "raises": ECHO + b"\n    def initialize(self, args):\n        raise ValueError('not today')\n",
    }
    for name, program in programs.items():
        yield _load(f"program/{name}", f"program_{name}", _override(CONFIG, {"1/model.py": program}))
    yield from _index("after_invalid")


def _ensemble(steps: list[Json], **members: Any) -> Json:
    sides = [{"name": name, "data_type": "TYPE_FP32", "dims": [4]} for name in "AB"]
    output = {"name": "S", "data_type": "TYPE_FP32", "dims": [4]}
    described: Json = {"platform": "ensemble", "max_batch_size": 8, "input": sides, "output": [output]}
    return described | {"ensemble_scheduling": {"step": steps}} | members


def _step(model: str, inputs_from: Json, outputs_to: Json, version: int = -1) -> Json:
    return {"model_name": model, "model_version": version, "input_map": inputs_from, "output_map": outputs_to}


def _ensembles() -> Iterator[Exchange]:
    both = {"INPUT0": "A", "INPUT1": "B"}
    half = {"name": "S", "data_type": "TYPE_INT32", "dims": [4]}
    asked = {
        "unknown_model": _ensemble([_step("nope", both, {"OUTPUT0": "S"})]),
        "unknown_version": _ensemble([_step("add_sub", both, {"OUTPUT0": "S"}, 9)]),
        "no_steps": _ensemble([]),
        "unused_input": _ensemble([_step("add_sub", {"INPUT0": "A", "INPUT1": "A"}, {"OUTPUT0": "S"})]),
        "unknown_input": _ensemble([_step("add_sub", both | {"Q": "A"}, {"OUTPUT0": "S"})]),
        "unknown_output": _ensemble([_step("add_sub", both, {"Q": "S"})]),
        "output_never_made": _ensemble([_step("add_sub", both, {"OUTPUT0": "T"})]),
        "made_twice": _ensemble([_step("add_sub", both, {"OUTPUT0": "S", "OUTPUT1": "S"})]),
        "datatypes": _ensemble([_step("add_sub", both, {"OUTPUT0": "S"})], output=[half]),
        "batch": _ensemble([_step("add_sub", both, {"OUTPUT0": "S"})], max_batch_size=16),
        "instance_group": _ensemble([_step("add_sub", both, {"OUTPUT0": "S"})], instance_group=[{"count": 1}]),
    }
    for name, config in asked.items():
        body = _override(config, {"1/keep": b""})
        yield _load(f"ensemble/{name}", f"ensemble_{name}", body)
    good = _ensemble([_step("add_sub", both, {"OUTPUT0": "S"})])
    yield _load("ensemble/good", "ensemble_good", _override(good, {"1/keep": b""}))
    yield get("load/ensemble_config", "/v2/models/ensemble_good/config")
    letters = [tensor(name, "FP32", [1, 4], [1, 2, 3, 4]) for name in "AB"]
    yield infer("load/ensemble_infer", "ensemble_good", inputs(*letters))
    yield from _unload("member", "add_sub")
    yield infer("unload/member_then_ensemble", "ensemble_addsub", inputs(*letters))
    yield get("unload/member_then_ready", "/v2/models/ensemble_addsub/ready")
    yield _load("member_again", "add_sub")
    yield infer("load/member_then_ensemble", "ensemble_addsub", inputs(*letters))
    yield from _unload("dependents", "ensemble_addsub", {"parameters": {"unload_dependents": True}})
    yield get("unload/dependent_ready", "/v2/models/add_sub/ready")
    yield from _index("after_dependents")
    yield _load("ensemble_again", "ensemble_addsub")
    yield infer("load/ensemble_again_infer", "ensemble_addsub", inputs(*letters))
    yield from _unload("dependents_text", "ensemble_addsub", {"parameters": {"unload_dependents": "yes"}})
    yield _load("ensemble_once_more", "ensemble_addsub")


def _over_grpc() -> Iterator[Exchange]:
    yield grpc("load/on_demand", "RepositoryModelLoad", {"model_name": "on_demand"})
    yield grpc("load/unknown", "RepositoryModelLoad", {"model_name": "nope"})
    config = {"parameters": {"config": {"string_param": json.dumps(CONFIG | {"max_batch_size": 3})}}}
    yield grpc("load/config", "RepositoryModelLoad", {"model_name": "on_demand"} | config)
    yield grpc("load/config_then_config", "ModelConfig", {"name": "on_demand"})
    files = {
        "config": {"string_param": json.dumps(CONFIG)},
        "file:5/model.py": {"bytes_param": base64_text(ECHO)},
    }
    yield grpc("load/file", "RepositoryModelLoad", {"model_name": "on_demand", "parameters": files})
    yield grpc("load/file_then_metadata", "ModelMetadata", {"name": "on_demand"})
    text = files | {"file:5/model.py": {"string_param": "x"}}
    yield grpc("load/file_as_text", "RepositoryModelLoad", {"model_name": "on_demand", "parameters": text})
    number = {"parameters": {"config": {"int64_param": "1"}}}
    yield grpc("load/config_number", "RepositoryModelLoad", {"model_name": "on_demand"} | number)
    yield grpc("load/named_repository", "RepositoryModelLoad", {"model_name": "on_demand", "repository_name": "x"})
    yield grpc("unload/on_demand", "RepositoryModelUnload", {"model_name": "on_demand"})
    yield pause("unload/grpc_on_demand", SETTLE_S)
    yield grpc("unload/unknown", "RepositoryModelUnload", {"model_name": "nope"})
    dependents = {"parameters": {"unload_dependents": {"string_param": "yes"}}}
    yield grpc("unload/dependents_text", "RepositoryModelUnload", {"model_name": "on_demand"} | dependents)
    yield grpc("unload/no_name", "RepositoryModelUnload")


def _failed_load() -> Iterator[Exchange]:
    yield _load("bad_load", "bad_load")
    yield get("load/bad_load_ready", "/v2/models/bad_load/ready")
    yield get("load/bad_load_metadata", "/v2/models/bad_load")
    yield get("load/bad_load_config", "/v2/models/bad_load/config")
    yield infer("load/bad_load_infer", "bad_load", inputs(tensor("INPUT0", "INT32", [1], [1])))
    yield grpc("load/bad_load", "RepositoryModelLoad", {"model_name": "bad_load"})
    yield get("load/health_after_bad_load", "/v2/health/ready")
    yield grpc("load/health_after_bad_load", "ServerReady")
    yield grpc("load/check_after_bad_load", "Health.Check")
    yield from _index("after_bad_load")
    yield from _unload("bad_load", "bad_load")
    yield get("unload/health_after_bad_load", "/v2/health/ready")
    yield from _index("after_unload_of_bad_load")
