"""Whether a configuration can be served, in Triton's words.

Triton looks twice. `check_structure` is its first look, at the configuration alone: what fails there was never a model,
and a load of it leaves everything as it was. `check_tensors` is the second, at the completed configuration of one
version: what fails there is a model that is unavailable.
"""

from collections.abc import Iterable
from math import prod

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelSequenceBatching,
)

from engine.errors import ErrorCode, SluiceError
from pipelines.repository.completion import ENSEMBLE
from pipelines.repository.ensemble_structure import check_ensemble

_CORRELATION_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")


def check_structure(config: ModelConfig) -> None:
    """Raises SluiceError INVALID for what no model can be."""
    if config.max_batch_size < 0:
        raise _invalid(f"'max_batch_size' must be non-negative value for {config.name}")
    _check_platform(config)
    if config.HasField("dynamic_batching"):
        _check_dynamic_batching(config.dynamic_batching, config)
    if config.HasField("sequence_batching"):
        _check_sequence_batching(config.sequence_batching, config)
    _check_cache(config)
    if config.platform == ENSEMBLE:
        check_ensemble(config)


def check_tensors(config: ModelConfig) -> None:
    """Raises SluiceError INVALID for tensors and instance groups that cannot be."""
    for each in config.input:
        _check_input(each, config)
    for each in config.output:
        _check_tensor("output", each, config.name)
    _check_names_once("input", config.input, config.name)
    _check_names_once("output", config.output, config.name)
    for group in config.instance_group:
        _check_group(group, config.name)
    known = {each.name for each in config.input}
    for batch_input in config.batch_input:
        for source in batch_input.source_input:
            if source not in known:
                raise _invalid(f"unknown source input name '{source}' for {config.name}")


def _check_platform(config: ModelConfig) -> None:
    if config.platform == ENSEMBLE:
        if config.backend:
            raise _invalid(f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type")
        if not config.HasField("ensemble_scheduling"):
            raise _invalid(f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble")
    elif config.HasField("ensemble_scheduling"):
        raise _invalid(f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble")


def _check_dynamic_batching(batching: ModelDynamicBatching, config: ModelConfig) -> None:
    _check_preferred("dynamic batching", batching.preferred_batch_size, config)
    levels = batching.priority_levels
    if not levels:
        return
    if not 1 <= batching.default_priority_level <= levels:
        raise _invalid(f"default priority level must be in range [1, {levels}] for {config.name}")
    if any(not 1 <= level <= levels for level in batching.priority_queue_policy):
        raise _invalid(f"priority queue policy must have priority level in range [1, {levels}] for {config.name}")


def _check_preferred(what: str, sizes: Iterable[int], config: ModelConfig) -> None:
    for size in sizes:
        if size <= 0:
            raise _invalid(f"{what} preferred size must be positive for {config.name}")
        if size > config.max_batch_size:
            raise _invalid(f"{what} preferred size must be <= max batch size for {config.name}")


def _check_sequence_batching(batching: ModelSequenceBatching, config: ModelConfig) -> None:
    if batching.HasField("oldest"):
        _check_preferred("sequence batching", batching.oldest.preferred_batch_size, config)
    seen: set[int] = set()
    for tensor in batching.control_input:
        if not tensor.name:
            raise _invalid(f"sequence batching control tensor must have a name for {config.name}")
        for control in tensor.control:
            kind = ModelSequenceBatching.Control.Kind.Name(control.kind)
            if control.kind in seen:
                raise _invalid(f"sequence batching specifies multiple {kind} tensors for {config.name}")
            seen.add(control.kind)
            _check_control(control, kind, config.name)


def _check_control(control: ModelSequenceBatching.Control, kind: str, name: str) -> None:
    given = {
        field: list(getattr(control, field))
        for field in ("int32_false_true", "fp32_false_true", "bool_false_true")
        if getattr(control, field)
    }
    if control.kind == ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
        if given:
            raise _invalid(
                "sequence batching must not specify either 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
                f"for {kind} for {name}"
            )
        if model_config_pb2.DataType.Name(control.data_type) not in _CORRELATION_TYPES:
            raise _invalid(
                f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
                "TYPE_UINT32, TYPE_INT32 and TYPE_STRING"
            )
        return
    if len(given) != 1:
        raise _invalid(
            "sequence batching must specify exactly one of 'int32_false_true', 'fp32_false_true' or 'bool_false_true' "
            f"for {kind} for {name}"
        )
    for field, values in given.items():
        if len(values) != 2:
            raise _invalid(f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {name}")


def _check_cache(config: ModelConfig) -> None:
    if not config.response_cache.enable:
        return
    begin = f"Response Cache does not currently support model {config.name} with"
    if config.model_transaction_policy.decoupled:
        raise _invalid(f"{begin} 'decoupled' transaction policy. Please disable the response cache.")
    if config.HasField("sequence_batching"):
        raise _invalid(f"{begin} sequence batching scheduler. Please disable the response cache.")


def _check_input(tensor: ModelInput, config: ModelConfig) -> None:
    _check_tensor("input", tensor, config.name)
    if tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        raise _invalid(f"model input NHWC/NCHW require 3 dims for {config.name}")
    if tensor.is_shape_tensor and config.backend != "tensorrt":
        raise _invalid(f"shape tensors are only supported for TensorRT platform for {config.name}")


def _check_tensor(what: str, tensor: ModelInput | ModelOutput, name: str) -> None:
    if not tensor.name:
        raise _invalid(f"model {what} must specify 'name' for {name}")
    begin = f"model {what} '{tensor.name}'"
    if tensor.data_type == model_config_pb2.TYPE_INVALID:
        raise _invalid(f"{begin} must specify 'data_type' for {name}")
    if not tensor.dims:
        raise _invalid(f"{begin} must specify 'dims' for {name}")
    _check_dims(begin, tensor.dims, name)
    if tensor.HasField("reshape"):
        _check_reshape(begin, list(tensor.dims), list(tensor.reshape.shape), name)


def _check_dims(begin: str, dims: Iterable[int], name: str) -> None:
    if any(dim < 1 and dim != -1 for dim in dims):
        raise _invalid(
            f"{begin} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {name}"
        )


def _check_reshape(begin: str, dims: list[int], shape: list[int], name: str) -> None:
    _check_dims(f"{begin} reshape", shape, name)
    if dims.count(-1) != shape.count(-1):
        raise _invalid(f"{begin} has different number of variable-size dimensions for dims and reshape for {name}")
    if _runs(dims) != _runs(shape):
        raise _invalid(f"{begin} has different size for dims and reshape for {name}")


def _runs(dims: list[int]) -> list[int]:
    """The number of elements of each run of fixed dimensions between variable ones: a reshape keeps them."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _check_names_once(what: str, tensors: Iterable[ModelInput | ModelOutput], name: str) -> None:
    """The real server loads two tensors of one name; which of them a request means, nobody can say."""
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise _invalid(f"model {what} '{tensor.name}' is given more than once for {name}")
        seen.add(tensor.name)


def _check_group(group: ModelInstanceGroup, name: str) -> None:
    if group.kind == ModelInstanceGroup.KIND_CPU and group.gpus:
        raise _invalid(f"instance group {group.name} of model {name} has kind KIND_CPU but specifies one or more GPUs")


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
