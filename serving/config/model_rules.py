"""Rules for a model's tensors, batch tensors, instances and warm-up samples, in Triton's words."""

from collections.abc import Iterable, Iterator
from math import prod

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import (
    BatchInput,
    BatchOutput,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
    ModelWarmup,
)

from sluice.serving.findings import Finding

TENSORRT = "tensorrt"
_BATCH_TYPES = (model_config_pb2.TYPE_INT32, model_config_pb2.TYPE_FP32)
_WITHOUT_GPUS = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL)


def tensor_findings(config: ModelConfig, *, is_complete: bool) -> Iterator[Finding]:
    """Yield what is wrong with tensors. Without `is_complete` the model's file may still tell types, dims and more."""
    for index, each in enumerate(config.input):
        yield from _tensor("input", f"input[{index}]", each, config, is_complete)
        yield from _input(f"input[{index}]", each, config)
    for index, output in enumerate(config.output):
        yield from _tensor("output", f"output[{index}]", output, config, is_complete)
    yield from _names_once("input", config.input, config.name)
    yield from _names_once("output", config.output, config.name)
    yield from _batch_inputs(config, is_complete)
    yield from _batch_outputs(config, is_complete)


def _input(path: str, tensor: ModelInput, config: ModelConfig) -> Iterator[Finding]:
    if tensor.format != ModelInput.FORMAT_NONE and len(tensor.dims) != 3:
        yield Finding(f"model input NHWC/NCHW require 3 dims for {config.name}", f"{path}.format")
    if tensor.is_shape_tensor and config.backend != TENSORRT:
        message = f"shape tensors are only supported for TensorRT platform for {config.name}"
        yield Finding(message, f"{path}.is_shape_tensor")


def _tensor(
    what: str, path: str, tensor: ModelInput | ModelOutput, config: ModelConfig, is_complete: bool
) -> Iterator[Finding]:
    name = config.name
    if not tensor.name:
        yield Finding(f"model {what} must specify 'name' for {name}", path, 'name: "…"')
        return
    begin = f"model {what} '{tensor.name}'"
    if is_complete and tensor.data_type == model_config_pb2.TYPE_INVALID:
        yield Finding(f"{begin} must specify 'data_type' for {name}", path, "data_type: TYPE_…")
    if is_complete and not tensor.dims:
        yield Finding(f"{begin} must specify 'dims' for {name}", path, "dims: [ … ]")
    if any(dim < 1 and dim != -1 for dim in tensor.dims):
        yield Finding(
            f"{begin} dimension must be integer >= 1, or -1 to indicate a variable-size dimension for {name}",
            f"{path}.dims",
            "-1 for a size that varies" if 0 in tensor.dims else "",
        )
    if tensor.HasField("reshape") and tensor.dims:
        yield from _reshape(begin, f"{path}.reshape", list(tensor.dims), list(tensor.reshape.shape), name)


def _reshape(begin: str, path: str, dims: list[int], shape: list[int], name: str) -> Iterator[Finding]:
    if any(dim < 1 and dim != -1 for dim in shape):
        yield Finding(
            f"{begin} reshape dimensions must be integer >= 1, or -1 to indicate a variable-size dimension for {name}",
            path,
        )
    elif dims.count(-1) != shape.count(-1):
        yield Finding(f"{begin} has different number of variable-size dimensions for dims and reshape for {name}", path)
    elif _runs(dims) != _runs(shape):
        yield Finding(f"{begin} has different size for dims and reshape for {name}", path)


def _runs(dims: list[int]) -> list[int]:
    """Return the number of elements of each run of fixed dimensions between variable ones. A reshape keeps them."""
    runs: list[list[int]] = [[]]
    for dim in dims:
        if dim == -1:
            runs.append([])
        else:
            runs[-1].append(dim)
    return [prod(run) for run in runs]


def _names_once(what: str, tensors: Iterable[ModelInput | ModelOutput], name: str) -> Iterator[Finding]:
    """Check that names are unique. Triton loads two tensors of one name, but a request cannot tell them apart."""
    seen: set[str] = set()
    for index, tensor in enumerate(tensors):
        if tensor.name and tensor.name in seen:
            yield Finding(f"model {what} '{tensor.name}' is given more than once for {name}", f"{what}[{index}].name")
        seen.add(tensor.name)


def _batch_inputs(config: ModelConfig, is_complete: bool) -> Iterator[Finding]:
    for index, each in enumerate(config.batch_input):
        path = f"batch_input[{index}]"
        kind = BatchInput.Kind.Name(each.kind)
        yield from _sources("input", kind, path, each.source_input, config, is_complete)
        if each.data_type not in _BATCH_TYPES:
            message = f"batch input data type must be TYPE_INT32 or TYPE_FP32 for {config.name}"
            yield Finding(message, f"{path}.data_type", "data_type: TYPE_FP32")
        if not each.target_name:
            yield Finding(f"batch input of kind '{kind}' must specify 'target_name' for {config.name}", path)


def _batch_outputs(config: ModelConfig, is_complete: bool) -> Iterator[Finding]:
    known = {each.name for each in config.output}
    for index, each in enumerate(config.batch_output):
        path = f"batch_output[{index}]"
        yield from _sources("output", BatchOutput.Kind.Name(each.kind), path, each.source_input, config, is_complete)
        seen: set[str] = set()
        for number, target in enumerate(each.target_name):
            place = f"{path}.target_name[{number}]"
            if target not in known and (is_complete or known):
                yield Finding(f"unknown target output name '{target}' for {config.name}", place)
            if target in seen:
                yield Finding(f"target output name '{target}' can only be specified once for {config.name}", place)
            seen.add(target)


def _sources(
    what: str, kind: str, path: str, sources: Iterable[str], config: ModelConfig, is_complete: bool
) -> Iterator[Finding]:
    """Check the source inputs of a batch tensor. Every kind has exactly one."""
    given = list(sources)
    if len(given) != 1:
        message = f"batch {what} kind '{kind}' expects 1 source input, got {len(given)} for {config.name}"
        yield Finding(message, path, 'source_input: "…"')
    known = {each.name for each in config.input}
    for number, source in enumerate(given):
        if source not in known and (is_complete or known):
            yield Finding(f"unknown source input name '{source}' for {config.name}", f"{path}.source_input[{number}]")


def instance_findings(config: ModelConfig, *, is_complete: bool) -> Iterator[Finding]:
    """Yield what is wrong with instance groups and samples. Without `is_complete` there may be more inputs."""
    for index, group in enumerate(config.instance_group):
        yield from _group(group, f"instance_group[{index}]", config.name)
    yield from _resources(config)
    for index, sample in enumerate(config.model_warmup):
        yield from _warmup(sample, f"model_warmup[{index}]", config, is_complete)


def _group(group: ModelInstanceGroup, path: str, name: str) -> Iterator[Finding]:
    if group.kind in _WITHOUT_GPUS and group.gpus:
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        message = f"instance group {group.name} of model {name} has kind {kind} but specifies one or more GPUs"
        yield Finding(message, f"{path}.gpus", f"kind: KIND_GPU, or {kind} without gpus")


def _resources(config: ModelConfig) -> Iterator[Finding]:
    """Check the rate limiter's resources: each is global in all groups, or in none."""
    is_global: dict[str, bool] = {}
    for index, group in enumerate(config.instance_group):
        for number, each in enumerate(group.rate_limiter.resources):
            path = f"instance_group[{index}].rate_limiter.resources[{number}]"
            shared = bool(getattr(each, "global"))
            if not each.name:
                yield Finding(f"a resource of the rate limiter must have a name for {config.name}", path, 'name: "…"')
            elif is_global.setdefault(each.name, shared) != shared:
                message = (
                    f'Resource "{each.name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
                yield Finding(message, path)


def _warmup(sample: ModelWarmup, path: str, config: ModelConfig, is_complete: bool) -> Iterator[Finding]:
    most = max(config.max_batch_size, 1)
    may_grow = not is_complete and config.max_batch_size == 0  # the model's file may still tell a batch dimension
    if sample.batch_size > most and not may_grow:
        yield Finding(
            f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for '{config.name}', max "
            f"allowed is {config.max_batch_size}",
            f"{path}.batch_size",
            f"max_batch_size: {sample.batch_size}" + (f", or batch_size: {most}" if config.max_batch_size else ""),
        )
    # A loaded model rejects unknown inputs itself. Without one, the configuration is all that is known.
    known = _known_inputs(config) if config.input and not is_complete else set(sample.inputs)
    for name in sorted(sample.inputs):
        inner = f'{path}.inputs["{name}"]'
        yield from _warmup_input(name, sample.inputs[name], inner)
        if name not in known:
            yield Finding(f"unexpected inference input '{name}' for model '{config.name}'", inner)


def _warmup_input(name: str, given: ModelWarmup.Input, path: str) -> Iterator[Finding]:
    if given.data_type == model_config_pb2.TYPE_INVALID:
        yield Finding(f"warmup setting expects input '{name}' to have data_type set", path, "data_type: TYPE_…")
    if any(dim < 0 for dim in given.dims):
        message = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        yield Finding(message, f"{path}.value.dims", "sizes as in a request, without the batch")
    if given.WhichOneof("input_data_type") is None:
        yield Finding(f"warmup setting expects input '{name}' to have input_data_type set", path, "zero_data: true")


def _known_inputs(config: ModelConfig) -> set[str]:
    """Return the inputs that a sample may have: the model's, and those that the server adds."""
    batching = config.sequence_batching
    return {
        *(each.name for each in config.input),
        *(each.name for each in batching.control_input),
        *(each.input_name for each in batching.state),
        *(name for each in config.batch_input for name in each.target_name),
    }
