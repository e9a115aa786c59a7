"""Configurations that the real server refuses, and its sentences."""

import json
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from engine.errors import ErrorCode, SluiceError
from pipelines.repository.completion import normalize
from pipelines.repository.config_json import parse_config_json
from pipelines.repository.validation import check_structure, check_tensors

IN: dict[str, Any] = {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}
OUT: dict[str, Any] = {"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}
START = {"name": "S", "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}]}


def config_of(**given: Any) -> ModelConfig:
    base = {"name": "m", "backend": "python", "input": [IN], "output": [OUT], "max_batch_size": 4}
    return parse_config_json(json.dumps({**base, **given}))


def control(**given: Any) -> dict[str, Any]:
    return {"control_input": [{"name": "S", "control": [given]}]}


def refusal(check: Any, config: ModelConfig) -> str:
    with pytest.raises(SluiceError) as caught:
        check(config)
    assert caught.value.code is ErrorCode.INVALID
    return caught.value.message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_batch_size": -1}, "'max_batch_size' must be non-negative value for m"),
        ({"platform": "ensemble"}, "Ensemble model 'm' must have platform type 'ensemble' and empty backend type"),
        (
            {"platform": "ensemble", "backend": ""},
            "ensemble scheduling must be set for ensemble m whose platform is ensemble",
        ),
        ({"dynamic_batching": {"preferred_batch_size": [8]}},
         "dynamic batching preferred size must be <= max batch size for m"),
        ({"dynamic_batching": {"preferred_batch_size": [0]}}, "dynamic batching preferred size must be positive for m"),
        ({"dynamic_batching": {"priority_levels": 2}}, "default priority level must be in range [1, 2] for m"),
        ({"dynamic_batching": {"priority_levels": 2, "default_priority_level": 3}},
         "default priority level must be in range [1, 2] for m"),
        ({"dynamic_batching": {"priority_levels": 2, "default_priority_level": 1,
                               "priority_queue_policy": {"3": {"max_queue_size": 1}}}},
         "priority queue policy must have priority level in range [1, 2] for m"),
        ({"sequence_batching": control(kind="CONTROL_SEQUENCE_START", int32_false_true=[0])},
         "sequence batching control 'int32_false_true' must have exactly 2 entries for CONTROL_SEQUENCE_START for m"),
        ({"sequence_batching": {"control_input": [START, {**START, "name": "T"}]}},
         "sequence batching specifies multiple CONTROL_SEQUENCE_START tensors for m"),
        ({"sequence_batching": control(kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_FP32")},
         "unexpected data type for control CONTROL_SEQUENCE_CORRID for m. Allowed data types are TYPE_UINT64, "
         "TYPE_INT64, TYPE_UINT32, TYPE_INT32 and TYPE_STRING"),
        ({"sequence_batching": control(kind="CONTROL_SEQUENCE_CORRID", int32_false_true=[0, 1])},
         "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
         "CONTROL_SEQUENCE_CORRID for m"),
        ({"sequence_batching": control(kind="CONTROL_SEQUENCE_END")}, "must specify exactly one of"),
        ({"sequence_batching": {"control_input": [{"control": []}]}}, "must have a name"),
        ({"sequence_batching": {"oldest": {"preferred_batch_size": [9]}}}, "preferred size must be <= max batch size"),
        ({"response_cache": {"enable": True}, "model_transaction_policy": {"decoupled": True}},
         "Response Cache does not currently support model m with 'decoupled' transaction policy. "
         "Please disable the response cache."),
        ({"response_cache": {"enable": True}, "sequence_batching": {}},
         "Response Cache does not currently support model m with sequence batching scheduler. "
         "Please disable the response cache."),
    ],
)  # fmt: skip
def test_no_model_at_all(given: dict[str, Any], message: str) -> None:
    assert message in refusal(check_structure, config_of(**given))


@pytest.mark.parametrize("what", ["input", "output"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dims": [0]}, "'T' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"),
        ({"dims": [-2]}, "'T' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for m"),
        ({"dims": []}, "'T' must specify 'dims' for m"),
        ({"data_type": "TYPE_INVALID"}, "'T' must specify 'data_type' for m"),
        ({"name": ""}, "must specify 'name' for m"),
        ({"dims": [2], "reshape": {"shape": [3]}}, "'T' has different size for dims and reshape for m"),
        ({"dims": [2, -1, 3], "reshape": {"shape": [6, -1]}}, "'T' has different size for dims and reshape for m"),
        (
            {"dims": [-1, -1], "reshape": {"shape": [-1]}},
            "'T' has different number of variable-size dimensions for dims and reshape for m",
        ),
        ({"dims": [1], "reshape": {"shape": [0]}}, "'T' reshape dimension must be integer >= 1"),
    ],
)
def test_tensors_that_cannot_be(what: str, given: dict[str, Any], message: str) -> None:
    tensor = {"name": "T", "data_type": "TYPE_INT32", "dims": [1], **given}
    assert f"model {what} {message}" in refusal(check_tensors, config_of(**{what: [tensor]}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": [{**IN, "format": "FORMAT_NCHW"}]}, "model input NHWC/NCHW require 3 dims for m"),
        ({"input": [{**IN, "is_shape_tensor": True}]}, "shape tensors are only supported for TensorRT platform for m"),
        ({"batch_input": [{"source_input": ["NOPE"]}]}, "unknown source input name 'NOPE' for m"),
        ({"instance_group": [{"kind": "KIND_CPU", "gpus": [0]}]},
         "instance group m_0 of model m has kind KIND_CPU but specifies one or more GPUs"),
        ({"input": [IN, IN]}, "model input 'INPUT0' is given more than once for m"),
        ({"output": [OUT, OUT]}, "model output 'OUTPUT0' is given more than once for m"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded(given: dict[str, Any], message: str) -> None:
    config = config_of(**given)
    normalize(config)
    assert refusal(check_tensors, config) == message


@pytest.mark.parametrize(
    "given",
    [
        {"input": [], "output": []},
        {"output": [{**OUT, "name": "INPUT0"}]},
        {"input": [{**IN, "dims": [2, -1, 6], "reshape": {"shape": [2, 1, -1, 3, 2]}}]},
        {"input": [{**IN, "dims": [1], "reshape": {"shape": []}}]},
        {"input": [{**IN, "format": "FORMAT_NCHW", "dims": [1, 2, 3]}]},
        {"dynamic_batching": {"default_priority_level": 3}},
        {"dynamic_batching": {}, "max_batch_size": 0},
        {"sequence_batching": {}},
        {"sequence_batching": {"direct": {}}, "max_batch_size": 0},
        {"sequence_batching": {"control_input": [START], "oldest": {"max_candidate_sequences": 0}}},
        {"sequence_batching": control(kind="CONTROL_SEQUENCE_CORRID", data_type="TYPE_STRING")},
        {"response_cache": {"enable": True}},
        {"instance_group": [{"count": -1}, {"passive": True}]},
    ],
)
def test_what_the_real_server_loads(given: dict[str, Any]) -> None:
    config = config_of(**given)
    check_structure(config)
    normalize(config)
    check_tensors(config)


def step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> dict[str, Any]:
    return {"model_name": model, "model_version": -1, "input_map": inputs, "output_map": outputs}


AB = {"INPUT0": "A", "INPUT1": "B"}


@pytest.mark.parametrize(
    ("steps", "given", "message"),
    [
        ([], {}, "must specify 'step' for ensemble 'e'"),
        ([step("", AB, {"O": "S"})], {}, "must specify 'model_name' in step 0 of ensemble 'e'"),
        ([step("x", {}, {"O": "S"})], {}, "must specify 'input_map' in step 0 of ensemble 'e'"),
        ([step("x", AB, {})], {}, "must specify 'output_map' in step 0 of ensemble 'e'"),
        ([step("x", {"I": ""}, {"O": "S"})], {}, "must specify mapping value for key 'I' in step 0 of ensemble 'e'"),
        ([step("x", {"INPUT0": "A"}, {"O": "S"})], {}, "ensemble input 'B' for ensemble e' is not used"),
        ([step("x", AB, {"O": "s2"})], {}, "ensemble output 'S' for ensemble e' is not used"),
        ([step("x", AB, {"O": "S", "P": "T"})], {}, "ensemble tensor 'T' is unused in ensemble 'e'"),
        ([step("x", AB, {"O": "S"}), step("x", AB, {"O": "S"})], {},
         "ensemble tensor 'S' can appear in an output map only once for ensemble 'e' step 1"),
        ([step("x", {"I": "A", "J": "y"}, {"O": "x"}), step("x", {"I": "x", "J": "B"}, {"O": "y", "P": "S"})], {},
         "output 'x' for ensemble 'e' is not written: at least one of its depending tensors, 'y', is not connected"),
        ([step("x", {**AB, "K": "zz"}, {"O": "S"})], {},
         "output 'S' for ensemble 'e' is not written: at least one of its depending tensors, 'zz', is not connected"),
        ([step("x", AB, {"O": "S"})], {"instance_group": [{}]},
         "instance group should not be specified for ensemble 'e'"),
        ([step("x", AB, {"O": "S"})], {"optimization": {}}, "optimization should not be specified for ensemble 'e'"),
        ([step("x", AB, {"O": "S"})], {"platform": "python"},
         "ensemble scheduling cannot be set for model 'e' whose platform is not ensemble"),
    ],
)  # fmt: skip
def test_ensembles_that_cannot_be(steps: list[Any], given: dict[str, Any], message: str) -> None:
    assert refusal(check_structure, ensemble(steps, **given)) == message


def test_an_ensemble_in_any_order() -> None:
    last = step("x", {"I": "p", "J": "q"}, {"O": "S"})
    check_structure(ensemble([last, step("x", {"I": "A"}, {"O": "p"}), step("x", {"I": "B"}, {"O": "q"})]))


def ensemble(steps: list[Any], **given: Any) -> ModelConfig:
    tensor = {"data_type": "TYPE_FP32", "dims": [4]}
    return parse_config_json(
        json.dumps(
            {
                "name": "e",
                "platform": "ensemble",
                "input": [{**tensor, "name": "A"}, {**tensor, "name": "B"}],
                "output": [{**tensor, "name": "S"}],
                "ensemble_scheduling": {"step": steps},
                **given,
            }
        )
    )
