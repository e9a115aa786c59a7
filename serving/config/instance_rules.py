"""What a model's instances may be and how they may begin: groups, resources and warm-up, in Triton's words."""

from collections.abc import Iterator

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup, ModelWarmup

from serving.findings import ConfigFinding

_WITHOUT_GPUS = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL)


def instance_findings(config: ModelConfig, *, is_complete: bool) -> Iterator[ConfigFinding]:
    """Not `is_complete`: the model's file may still tell of inputs."""
    for index, group in enumerate(config.instance_group):
        yield from _group(group, f"instance_group[{index}]", config.name)
    yield from _resources(config)
    for index, sample in enumerate(config.model_warmup):
        yield from _warmup(sample, f"model_warmup[{index}]", config, is_complete)


def _group(group: ModelInstanceGroup, path: str, name: str) -> Iterator[ConfigFinding]:
    if group.kind in _WITHOUT_GPUS and group.gpus:
        kind = ModelInstanceGroup.Kind.Name(group.kind)
        message = f"instance group {group.name} of model {name} has kind {kind} but specifies one or more GPUs"
        yield ConfigFinding(message, f"{path}.gpus", f"kind: KIND_GPU, or {kind} without gpus")


def _resources(config: ModelConfig) -> Iterator[ConfigFinding]:
    """A resource is either one for all devices or each device's own, for all groups alike."""
    is_global: dict[str, bool] = {}
    for index, group in enumerate(config.instance_group):
        for number, each in enumerate(group.rate_limiter.resources):
            path = f"instance_group[{index}].rate_limiter.resources[{number}]"
            shared = bool(getattr(each, "global"))
            if not each.name:
                message = f"a resource of the rate limiter must have a name for {config.name}"
                yield ConfigFinding(message, path, 'name: "…"')
            elif is_global.setdefault(each.name, shared) != shared:
                message = (
                    f'Resource "{each.name}" is present as both global and device-specific resource in the model '
                    "configuration."
                )
                yield ConfigFinding(message, path)


def _warmup(sample: ModelWarmup, path: str, config: ModelConfig, is_complete: bool) -> Iterator[ConfigFinding]:
    most = max(config.max_batch_size, 1)
    may_grow = not is_complete and config.max_batch_size == 0  # the model's file may yet say that it takes batches
    if sample.batch_size > most and not may_grow:
        yield ConfigFinding(
            f"failed to run warmup sample '{sample.name}': batch size {sample.batch_size} for '{config.name}', max "
            f"allowed is {config.max_batch_size}",
            f"{path}.batch_size",
            f"max_batch_size: {sample.batch_size}" + (f", or batch_size: {most}" if config.max_batch_size else ""),
        )
    # A model that is there refuses what it does not know; here its configuration is all that there is.
    known = _known_inputs(config) if config.input and not is_complete else set(sample.inputs)
    for name in sorted(sample.inputs):
        inner = f'{path}.inputs["{name}"]'
        yield from _warmup_input(name, sample.inputs[name], inner)
        if name not in known:
            yield ConfigFinding(f"unexpected inference input '{name}' for model '{config.name}'", inner)


def _warmup_input(name: str, given: ModelWarmup.Input, path: str) -> Iterator[ConfigFinding]:
    if given.data_type == model_config_pb2.TYPE_INVALID:
        message = f"warmup setting expects input '{name}' to have data_type set"
        yield ConfigFinding(message, path, "data_type: TYPE_…")
    if any(dim < 0 for dim in given.dims):
        message = f"warmup setting expects all variable-size dimensions are specified for input '{name}'"
        yield ConfigFinding(message, f"{path}.value.dims", "sizes as in a request, without the batch")
    if given.WhichOneof("input_data_type") is None:
        message = f"warmup setting expects input '{name}' to have input_data_type set"
        yield ConfigFinding(message, path, "zero_data: true")


def _known_inputs(config: ModelConfig) -> set[str]:
    """What a warm-up may fill: the model's inputs and those that the server itself gives it."""
    batching = config.sequence_batching
    return {
        *(each.name for each in config.input),
        *(each.name for each in batching.control_input),
        *(each.input_name for each in batching.state),
        *(name for each in config.batch_input for name in each.target_name),
    }
