"""An LLM's config.pbtxt: completed where it declares nothing, checked where it does, and its queue's defaults."""

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig, ModelInput, ModelInstanceGroup, ModelOutput

from sluice.engine.config import EngineConfig
from sluice.engine.scheduling.planner import find_policy
from sluice.engine.types import EngineInfo
from sluice.errors import SluiceError, invalid
from sluice.pipelines.llm.fields import INPUTS, OUTPUTS, PROMPTS, STOP_REQUEST, LlmInput
from sluice.pipelines.llm.model_folder import ModelYaml
from sluice.serving.spec import ModelSpec
from sluice.serving.tensors.datatypes import DATA_TYPES

BACKEND, TENSORRT_LLM_BACKEND = "llm", "tensorrtllm"

_DEFAULT_ENGINE = EngineConfig(model_path="")
_NO_FILE = ModelYaml()


def complete_config(config: ModelConfig, yaml: ModelYaml = _NO_FILE) -> ModelConfig:
    """Return `config` with all text and token tensors, as inputs and outputs where it declares none. The model is
    decoupled then, as a request that streams has many responses, unless `config` or its `model.yaml` says otherwise."""
    whole = deepcopy(config)
    if yaml.decoupled is not None and not whole.HasField("model_transaction_policy"):
        whole.model_transaction_policy.decoupled = yaml.decoupled
    whole.max_batch_size = whole.max_batch_size or yaml.max_batch_size
    if not whole.input and not whole.output and not whole.HasField("model_transaction_policy"):
        whole.model_transaction_policy.decoupled = True
    if not whole.input:
        whole.input.extend(_inputs())
    if not whole.output:
        whole.output.extend(_outputs())
    return whole


def default_llm_config(name: str) -> ModelConfig:
    """Return the configuration of a checkpoint that is served without a model repository."""
    config = ModelConfig(name=name, backend=BACKEND)
    config.version_policy.latest.num_versions = 1
    config.instance_group.add(name=name, kind=ModelInstanceGroup.KIND_MODEL, count=1)
    return complete_config(config)


def add_engine_parameters(config: ModelConfig, info: EngineInfo, engine: EngineConfig = _DEFAULT_ENGINE) -> ModelConfig:
    """Return `config` with the values that the engine chose at load, under TensorRT-LLM's names, else vLLM's."""
    completed = deepcopy(config)
    for key, value in {**_device_parameters(info, engine), **_engine_parameters(info)}.items():
        completed.parameters[key].string_value = str(value)
    return completed


def _engine_parameters(info: EngineInfo) -> dict[str, object]:
    return {
        "batching_strategy": "inflight_fused_batching" if find_policy(info.scheduler_policy).is_in_flight else "V1",
        "batch_scheduler_policy": info.scheduler_policy,
        "max_tokens_in_paged_kv_cache": info.num_blocks * info.block_size,
        "max_model_len": info.max_model_len,
        "max_num_seqs": info.max_num_seqs,
        "max_num_batched_tokens": info.max_num_batched_tokens,
        "runtime": info.runtime,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "kv_cache_dtype": info.kv_cache_dtype,
    }


def _device_parameters(info: EngineInfo, engine: EngineConfig) -> dict[str, object]:
    """Return the parameters that only apply to several devices, or to a runtime with a version."""
    sizes = {name: getattr(engine, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    completed: dict[str, object] = {name: size for name, size in sizes.items() if size > 1}
    if info.runtime_version:
        completed["runtime_version"] = info.runtime_version
    return completed


@dataclass(frozen=True, slots=True)
class QueueDefaults:
    """Defaults of `dynamic_batching` for requests that wait for the engine. `num_levels` 0 allows any priority."""

    num_levels: int = 0
    default_level: int = 0
    timeout_us: int = 0

    def priority(self, requested: int) -> int:
        """Return the requested priority, or the default one where it is not one of the levels."""
        return requested if not self.num_levels or 1 <= requested <= self.num_levels else self.default_level


def read_queue_defaults(config: ModelConfig) -> QueueDefaults:
    batching = config.dynamic_batching
    timeout_us = batching.default_queue_policy.default_timeout_microseconds
    return QueueDefaults(batching.priority_levels, batching.default_priority_level, timeout_us)


def declared_inputs(spec: ModelSpec) -> dict[str, LlmInput]:
    """Return the declared inputs by name. Raises SluiceError INVALID for a declaration that no LLM can follow."""
    unknown_outputs = [name for name in spec.outputs if name not in OUTPUTS]
    if unknown_outputs:
        raise _unknown(spec.name, "output", unknown_outputs, OUTPUTS)
    declared = {name: _match_input(spec, name) for name in spec.inputs}
    if spec.inputs.keys().isdisjoint(PROMPTS):
        message = f"model '{spec.name}' declares neither text_input nor input_ids, so nothing could be asked of it"
        raise invalid("input", message)
    return declared


def _match_input(spec: ModelSpec, name: str) -> LlmInput:
    known = INPUTS.get(name)
    if known is None:
        raise _unknown(spec.name, "input", [name], INPUTS)
    given = spec.inputs[name].data_type
    if name == STOP_REQUEST.name and given.name == STOP_REQUEST.datatype:
        return STOP_REQUEST
    if not is_compatible(known.datatype, given.name):
        message = f"input '{name}' of model '{spec.name}' must be of type {known.datatype}, got {given.name}"
        raise invalid("input", message)
    return known


def _unknown(model: str, what: str, names: list[str], known: Iterable[str]) -> SluiceError:
    listed = ", ".join(sorted(known))
    return invalid(what, f"model '{model}' declares the {what} '{names[0]}', which no LLM has; there are {listed}")


def _inputs() -> list[ModelInput]:
    return [
        ModelInput(name=each.name, data_type=config_type(each.datatype), dims=each.dims, optional=True)
        for each in INPUTS.values()
        if each.is_completed
    ]


def _outputs() -> list[ModelOutput]:
    return [
        ModelOutput(name=each.name, data_type=config_type(each.datatype), dims=each.dims)
        for each in OUTPUTS.values()
        if each.is_completed
    ]


def is_compatible(expected: str, given: str) -> bool:
    """Whether a tensor may be declared with the datatype `given`: integers of any size are alike, and so are floats."""
    kinds = {DATA_TYPES[datatype].dtype.kind.replace("u", "i") for datatype in (expected, given)}
    return len(kinds) == 1


def config_type(datatype: str) -> int:
    """Return the number of a datatype in config.pbtxt."""
    return int(DataType.Value(DATA_TYPES[datatype].config_name))
