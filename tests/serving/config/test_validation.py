"""Configurations that the real server refuses, and its sentences."""

import json
from typing import Any

import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.config.completion import fill_defaults
from sluice.serving.config.config_json import parse_config_json
from sluice.serving.config.validation import check_structure, check_tensors
from sluice.serving.findings import InvalidConfig

IN: dict[str, Any] = {"name": "INPUT0", "data_type": "TYPE_INT32", "dims": [-1]}
OUT: dict[str, Any] = {"name": "OUTPUT0", "data_type": "TYPE_INT32", "dims": [-1]}
DELAYING = {"timeout_action": "DELAY", "default_timeout_microseconds": 5}
STATE = {"input_name": "I", "output_name": "O", "data_type": "TYPE_INT32", "dims": [1]}
START = {"name": "S", "control": [{"kind": "CONTROL_SEQUENCE_START", "int32_false_true": [0, 1]}]}


def config_of(**given: Any) -> ModelConfig:
    base = {"name": "m", "backend": "python", "input": [IN], "output": [OUT], "max_batch_size": 4}
    return parse_config_json(json.dumps({**base, **given}))


def control(**given: Any) -> dict[str, Any]:
    return {"control_input": [{"name": "S", "control": [given]}]}


BATCH_INPUT: dict[str, Any] = {
    "kind": "BATCH_ELEMENT_COUNT", "target_name": ["T"], "data_type": "TYPE_FP32", "source_input": ["INPUT0"],
}  # fmt: skip
BATCH_OUTPUT: dict[str, Any] = {"target_name": ["OUTPUT0"], "source_input": ["INPUT0"]}
ZEROS: dict[str, Any] = {"data_type": "TYPE_INT32", "dims": [2], "zero_data": True}
WARMUP: dict[str, Any] = {"name": "w", "batch_size": 1, "inputs": {"INPUT0": ZEROS}}


def limited(resource: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "KIND_CPU", "rate_limiter": {"resources": [resource]}}


def sample(**given: Any) -> dict[str, Any]:
    return {**WARMUP, "inputs": {"INPUT0": {**ZEROS, **given}}}


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
        ({"sequence_batching": control(kind="CONTROL_SEQUENCE_END")},
         "sequence batching must specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' for "
         "CONTROL_SEQUENCE_END for m"),
        ({"sequence_batching": {"control_input": [{"control": []}]}}, "must have a name"),
        ({"sequence_batching": {"oldest": {"preferred_batch_size": [9]}}},
         "sequence batching preferred batch size must be <= max batch size for m"),
        ({"response_cache": {"enable": True}, "model_transaction_policy": {"decoupled": True}},
         "Response Cache does not currently support model m with 'decoupled' transaction policy. "
         "Please disable the response cache."),
        ({"response_cache": {"enable": True}, "sequence_batching": {}},
         "Response Cache does not currently support model m with sequence batching scheduler. "
         "Please disable the response cache."),
        ({"dynamic_batching": {"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1}},
         "Only one priority level is allowed when 'preserve_ordering' is true for m"),
        ({"dynamic_batching": {"preserve_ordering": True, "default_queue_policy": DELAYING}},
         "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"),
        ({"dynamic_batching": {"preserve_ordering": True, "priority_queue_policy": {"1": DELAYING}}},
         "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for m"),
        ({"sequence_batching": {"direct": {"minimum_slot_utilization": 1.5}}},
         "sequence batching minimum slot utilization must be in range (0.0, 1.0] for m"),
        ({"sequence_batching": {"control_input": [START, {**START, "control": []}]}},
         "sequence batching control tensor 'S' is specified for multiple control kinds for m"),
        ({"sequence_batching": control(kind="CONTROL_SEQUENCE_END", int32_false_true=[0, 1], fp32_false_true=[0, 1])},
         "sequence batching specifies more than one from 'int32_false_true', 'fp32_false_true' and 'bool_false_true' "
         "for CONTROL_SEQUENCE_END for m"),
        ({"sequence_batching": {"state": [{**STATE, "dims": [0]}]}},
         "sequence batching state 'I' dimension must be integer >= 1, or -1 to indicate a variable-size dimension for "
         "m"),
        ({"sequence_batching": {"state": [{**STATE, "use_growable_memory": True}]}},
         "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name 'I'."),
        ({"parameters": {"TRITON_BATCH_STRATEGY_PATH": {"string_value": "lib.so"}}},
         "model m asks for custom batching with the parameter TRITON_BATCH_STRATEGY_PATH: libraries that form batches "
         "are not loaded"),
        ({"model_repository_agents": {"agents": [{}]}}, "a repository agent must specify 'name' for m"),
        ({"model_metrics": {"metric_control": [{"histogram_options": {"buckets": [1]}}]}},
         "metric control must specify 'metric_identifier'"),
        ({"model_metrics": {"metric_control": [{"metric_identifier": {}, "histogram_options": {"buckets": [1]}}]}},
         "metric identifier must specify non-empty 'family'"),
        ({"model_metrics": {"metric_control": [{"metric_identifier": {"family": "f"}}]}},
         "metric control must specify 'histogram_options'"),
        ({"model_metrics": {"metric_control": [{"metric_identifier": {"family": "f"}, "histogram_options": {}}]}},
         "histogram options must specify non-empty 'buckets'"),
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
        ({"dims": [1], "reshape": {"shape": [0]}}, "'T' reshape dimensions must be integer >= 1"),
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
        ({"instance_group": [{"kind": "KIND_MODEL", "gpus": [0]}]},
         "instance group m_0 of model m has kind KIND_MODEL but specifies one or more GPUs"),
        ({"instance_group": [limited({"name": "R", "global": True}), limited({"name": "R"})]},
         'Resource "R" is present as both global and device-specific resource in the model configuration.'),
        ({"instance_group": [limited({"count": 1})]}, "a resource of the rate limiter must have a name for m"),
        ({"batch_input": [{**BATCH_INPUT, "source_input": []}]},
         "batch input kind 'BATCH_ELEMENT_COUNT' expects 1 source input, got 0 for m"),
        ({"batch_input": [{**BATCH_INPUT, "data_type": "TYPE_INT64"}]},
         "batch input data type must be TYPE_INT32 or TYPE_FP32 for m"),
        ({"batch_input": [{**BATCH_INPUT, "target_name": []}]},
         "batch input of kind 'BATCH_ELEMENT_COUNT' must specify 'target_name' for m"),
        ({"batch_output": [{**BATCH_OUTPUT, "source_input": ["INPUT0", "INPUT0"]}]},
         "batch output kind 'BATCH_SCATTER_WITH_INPUT_SHAPE' expects 1 source input, got 2 for m"),
        ({"batch_output": [{**BATCH_OUTPUT, "source_input": ["NOPE"]}]}, "unknown source input name 'NOPE' for m"),
        ({"batch_output": [{**BATCH_OUTPUT, "target_name": ["NOPE"]}]}, "unknown target output name 'NOPE' for m"),
        ({"batch_output": [{**BATCH_OUTPUT, "target_name": ["OUTPUT0", "OUTPUT0"]}]},
         "target output name 'OUTPUT0' can only be specified once for m"),
        ({"model_warmup": [{**WARMUP, "batch_size": 5}]},
         "failed to run warmup sample 'w': batch size 5 for 'm', max allowed is 4"),
        ({"max_batch_size": 0, "model_warmup": [{**WARMUP, "batch_size": 2}]},
         "failed to run warmup sample 'w': batch size 2 for 'm', max allowed is 0"),
        ({"model_warmup": [sample(data_type="TYPE_INVALID")]},
         "warmup setting expects input 'INPUT0' to have data_type set"),
        ({"model_warmup": [sample(dims=[-1])]},
         "warmup setting expects all variable-size dimensions are specified for input 'INPUT0'"),
        ({"model_warmup": [sample(zero_data=None)]},
         "warmup setting expects input 'INPUT0' to have input_data_type set"),
        ({"input": [IN, {**IN, "dims": [7]}]}, "model input 'INPUT0' is given more than once for m"),
        ({"output": [OUT, {**OUT, "dims": [7]}]}, "model output 'OUTPUT0' is given more than once for m"),
    ],
)  # fmt: skip
def test_models_that_cannot_be_loaded(given: dict[str, Any], message: str) -> None:
    config = config_of(**given)
    fill_defaults(config)
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
    fill_defaults(config)
    check_tensors(config)


def test_what_may_yet_come_from_the_file() -> None:
    given = {"input": [{"name": "INPUT0"}], "output": [], "batch_output": [BATCH_OUTPUT]}
    check_tensors(config_of(**given), is_complete=False)
    assert "must specify 'data_type'" in refusal(check_tensors, config_of(**given))
    warmed = config_of(model_warmup=[{**WARMUP, "inputs": {"NOPE": ZEROS}}])
    check_tensors(warmed)
    with pytest.raises(SluiceError, match="unexpected inference input 'NOPE' for model 'm'"):
        check_tensors(warmed, is_complete=False)


def test_everything_that_is_wrong_is_told_with_its_field() -> None:
    given = {"max_batch_size": -1, "dynamic_batching": {"preferred_batch_size": [2, 0]}}
    with pytest.raises(InvalidConfig) as caught:
        check_structure(config_of(**given))
    assert [(each.path, each.message) for each in caught.value.findings] == [
        ("max_batch_size", "'max_batch_size' must be non-negative value for m"),
        ("dynamic_batching.preferred_batch_size[0]", "dynamic batching preferred size must be <= max batch size for m"),
        ("dynamic_batching.preferred_batch_size[1]", "dynamic batching preferred size must be positive for m"),
    ]
    assert caught.value.message == caught.value.findings[0].message


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
        ([step("x", AB, {"O": "S"})], {"model_warmup": [WARMUP]},
         "model_warmup can not be specified for ensemble 'e'"),
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
