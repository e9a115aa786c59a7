"""Supported and ignored fields of config.pbtxt, by path from the top; a message's path stands for all in it."""

from collections.abc import Iterator, Mapping

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from sluice.serving.backend import Backend, BackendContext
from sluice.serving.config.completion import has_gpu
from sluice.serving.config.locations import NOWHERE, FieldLocations
from sluice.serving.config.pbtxt import CONFIG_FILENAME
from sluice.serving.findings import Finding

SUPPORTED_FIELDS = frozenset(
    {
        "name",
        "platform",
        "backend",
        "version_policy",
        "max_batch_size",
        "input.name",
        "input.data_type",
        "input.dims",
        "input.format",
        "input.reshape",
        "input.allow_ragged_batch",
        "input.optional",
        "output.name",
        "output.data_type",
        "output.dims",
        "output.reshape",
        "output.label_filename",
        "dynamic_batching",
        "sequence_batching.direct",
        "sequence_batching.oldest",
        "sequence_batching.max_sequence_idle_microseconds",
        "sequence_batching.control_input",
        "sequence_batching.state.input_name",
        "sequence_batching.state.output_name",
        "sequence_batching.state.data_type",
        "sequence_batching.state.dims",
        "sequence_batching.state.initial_state",
        "sequence_batching.iterative_sequence",
        "ensemble_scheduling.step.model_name",
        "ensemble_scheduling.step.model_version",
        "ensemble_scheduling.step.model_namespace",
        "ensemble_scheduling.step.input_map",
        "ensemble_scheduling.step.output_map",
        "ensemble_scheduling.max_inflight_requests",
        "instance_group.name",
        "instance_group.kind",
        "instance_group.count",
        "instance_group.rate_limiter",
        "instance_group.passive",
        "default_model_filename",
        "model_warmup",
        "metric_tags",
        "model_metrics",
        "parameters",
        "model_transaction_policy",
        "model_repository_agents",
        "response_cache",
    }
)
"""Paths of the fields that all backends support."""

_NO_TENSORRT = "only TensorRT plans have it"
_NO_SHAPE_TENSORS = "no backend takes shape tensors"
_LINEAR = "tensors are laid out row by row"
_NO_COPIES = "tensors are not copied between devices"

IGNORED_FIELDS: dict[str, str] = {
    "runtime": "a backend is chosen by its name",
    "input.is_shape_tensor": _NO_SHAPE_TENSORS,
    "input.is_non_linear_format_io": _LINEAR,
    "output.is_shape_tensor": _NO_SHAPE_TENSORS,
    "output.is_non_linear_format_io": _LINEAR,
    "batch_input": "batches of this backend carry no inputs of their own",
    "batch_output": "this backend's outputs are its own to split",
    "optimization.graph": "the backend has no graph to optimize",
    "optimization.priority": "models share the processors evenly",
    "optimization.cuda": _NO_COPIES,
    "optimization.execution_accelerators.gpu_execution_accelerator": "there is none for this backend, or no GPU",
    "optimization.execution_accelerators.cpu_execution_accelerator": "there is none for this backend",
    "optimization.input_pinned_memory": _NO_COPIES,
    "optimization.output_pinned_memory": _NO_COPIES,
    "optimization.gather_kernel_buffer_threshold": _NO_COPIES,
    "optimization.eager_batching": "batches are gathered when an instance is free",
    "sequence_batching.state.use_same_buffer_for_input_output": "each request's state is a tensor of its own",
    "sequence_batching.state.use_growable_memory": "each request's state is a tensor of its own",
    "instance_group.gpus": "instances of this backend choose no GPU",
    "instance_group.secondary_devices": "an instance has one device",
    "instance_group.profile": _NO_TENSORRT,
    "instance_group.host_policy": "instances of this backend are not bound to processors",
    "cc_model_filenames": "one file serves on every device",
    "model_operations": "the backend loads no libraries of operations",
}
"""Reasons to ignore fields, by path. A backend excepts its `supported_fields` and adds its `ignored_fields`."""
_ONLY_WITH_GPU = frozenset({"optimization.execution_accelerators.gpu_execution_accelerator"})
"""Fields that are ignored on a machine without a GPU, also by a backend that supports them."""


def ignored_fields_note(config: ModelConfig, backend: Backend | None, locations: FieldLocations = NOWHERE) -> list[str]:
    """Return a sentence that names every ignored field that is set, and one where GPUs are configured and missing.

    `config` is the configuration as written, without defaults; `locations` of its text add the lines. `backend` is None
    where it is not installed.
    """
    rules = ignored_fields(backend)
    lines = {path: locations.line_of(numbered) for path, numbered in _first_ignored(config, rules).items()}
    positions = {path: f"{CONFIG_FILENAME}:{line}: " if line else "" for path, line in lines.items()}
    listed = (f"{path} ({position}{rules[path]})" for path, position in positions.items())
    notes = [f"not obeyed: {'; '.join(listed)}"] if lines else []
    return [*notes, *(each.message for each in _missing_gpu_findings(config, rules))]


def ignored_field_findings(config: ModelConfig, backend: Backend | None) -> list[Finding]:
    """Return the findings of `ignored_fields_note`, one for each field."""
    rules = ignored_fields(backend)
    found = _first_ignored(config, rules).items()
    findings = [Finding(f"{path} is not obeyed: {rules[path]}", numbered) for path, numbered in found]
    return [*findings, *_missing_gpu_findings(config, rules)]


def ignored_fields(backend: Backend | None) -> dict[str, str]:
    """Return the fields that a backend ignores, with the reasons."""
    supported = backend.supported_fields if backend is not None else frozenset()
    if not has_gpu():
        supported -= _ONLY_WITH_GPU
    ignored = {path: reason for path, reason in IGNORED_FIELDS.items() if path not in supported}
    return ignored | dict(backend.ignored_fields if backend is not None else {})


def inactive_field_notes(config: ModelConfig, context: BackendContext) -> list[str]:
    """Return a sentence for each field that has no effect without a command line option."""
    notes = []
    if context.rate_limiter is None and any(group.HasField("rate_limiter") for group in config.instance_group):
        notes.append("instance_group.rate_limiter has no effect without --rate-limit=execution_count")
    policies = dict.fromkeys(group.host_policy for group in config.instance_group if group.host_policy)
    notes += [
        f"host_policy '{name}' is not known to the server, which takes it as --host-policy={name},cpu-cores=…"
        for name in policies
        if name not in context.host_policies
    ]
    return notes


def _missing_gpu_findings(config: ModelConfig, rules: Mapping[str, str]) -> list[Finding]:
    if has_gpu():
        return []
    for index, group in enumerate(config.instance_group):
        if group.kind == ModelInstanceGroup.KIND_GPU:
            return [Finding("there is no GPU, instances of KIND_GPU run on the CPU", f"instance_group[{index}].kind")]
        if group.gpus and group.kind == ModelInstanceGroup.KIND_AUTO and "instance_group.gpus" not in rules:
            return [Finding("there is no GPU, instances with gpus run on the CPU", f"instance_group[{index}].gpus")]
    return []


def _first_ignored(config: ModelConfig, rules: Mapping[str, str]) -> dict[str, str]:
    """Return the path with numbers of the first field at each ignored path, in order."""
    found: dict[str, str] = {}
    for path, numbered in _find_ignored(config, "", "", rules):
        found.setdefault(path, numbered)
    return found


def _find_ignored(
    message: Message, prefix: str, numbered_prefix: str, rules: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the paths of ignored fields that are set, without and with numbers. A message's fields are not repeated."""
    for field, value in message.ListFields():
        path = prefix + field.name
        if path in rules:
            yield path, numbered_prefix + field.name
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, inner in enumerate(value if field.is_repeated else [value]):
                yield from _find_ignored(inner, f"{path}.", f"{numbered_prefix}{field.name}[{index}].", rules)
