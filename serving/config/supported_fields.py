"""Which fields of config.pbtxt Sluice obeys, and why not the others: what is given and not obeyed is said at load."""

from collections.abc import Iterator, Mapping

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from serving.backend import Backend, BackendContext
from serving.config.completion import has_gpu
from serving.config.locations import NOWHERE, FieldLocations
from serving.config.pbtxt import CONFIG_FILENAME
from serving.findings import Finding

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
"""By path from the top; a message stands for everything in it."""

_NO_TENSORRT = "only TensorRT plans have it"
_NO_SHAPE_TENSORS = "no backend takes shape tensors"
_LINEAR = "tensors are laid out row by row"
_NO_COPIES = "tensors are not copied between devices"

IGNORED_FIELDS: dict[str, str] = {
    "runtime": "a backend is chosen by its name",
    "input.format": "backends get dims as they are",
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
"""The reason, by path from the top; a message stands for everything in it. A backend's `supported_fields` are
exceptions, and its `ignored_fields` come besides."""
_ONLY_WITH_GPU = frozenset({"optimization.execution_accelerators.gpu_execution_accelerator"})
"""Fields that a backend which supports them obeys only on a machine with a GPU."""


def ignored_fields_note(config: ModelConfig, backend: Backend | None, locations: FieldLocations = NOWHERE) -> list[str]:
    """A sentence with every field that is given but not obeyed, and one where GPUs are asked for and there are none.

    Give it the configuration as it was written, without defaults, and `locations` of its text for the lines. `backend`
    None: one that is not installed.
    """
    rules = ignored_fields(backend)
    found: dict[str, int | None] = {}
    for path, place in _unobeyed(config, "", "", rules):
        found.setdefault(path, locations.line_of(place))
    places = {path: f"{CONFIG_FILENAME}:{line}: " if line else "" for path, line in found.items()}
    listed = (f"{path} ({place}{rules[path]})" for path, place in places.items())
    notes = [f"not obeyed: {'; '.join(listed)}"] if found else []
    return [*notes, *(each.message for each in _without_gpu(config))]


def ignored_field_findings(config: ModelConfig, backend: Backend | None) -> list[Finding]:
    """The same one by one."""
    rules = ignored_fields(backend)
    found: dict[str, str] = {}
    for path, place in _unobeyed(config, "", "", rules):
        found.setdefault(path, place)
    named = [Finding(f"{path} is not obeyed: {rules[path]}", place) for path, place in found.items()]
    return [*named, *_without_gpu(config)]


def _without_gpu(config: ModelConfig) -> list[Finding]:
    groups = config.instance_group
    asking = [index for index, group in enumerate(groups) if group.kind == ModelInstanceGroup.KIND_GPU]
    if not asking or has_gpu():
        return []
    return [Finding("there is no GPU, instances of KIND_GPU run on the CPU", f"instance_group[{asking[0]}].kind")]


def ignored_fields(backend: Backend | None) -> dict[str, str]:
    """Return the fields that a backend does not obey, with the reasons."""
    supported = backend.supported_fields if backend is not None else frozenset()
    if not has_gpu():
        supported -= _ONLY_WITH_GPU
    ignored = {path: reason for path, reason in IGNORED_FIELDS.items() if path not in supported}
    return ignored | dict(backend.ignored_fields if backend is not None else {})


def _unobeyed(message: Message, prefix: str, place: str, rules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The paths of what is set and not obeyed, without and with numbers; of such a message only its own."""
    for field, value in message.ListFields():
        path = prefix + field.name
        if path in rules:
            yield path, place + field.name
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, inner in enumerate(value if field.is_repeated else [value]):
                yield from _unobeyed(inner, f"{path}.", f"{place}{field.name}[{index}].", rules)


def inactive_field_notes(config: ModelConfig, context: BackendContext) -> list[str]:
    """A sentence for each field that would be obeyed with another command line."""
    notes = []
    if context.rate_limiter is None and any(group.HasField("rate_limiter") for group in config.instance_group):
        notes.append("instance_group.rate_limiter has no effect without --rate-limit=execution_count")
    asked = dict.fromkeys(group.host_policy for group in config.instance_group if group.host_policy)
    notes += [
        f"host_policy '{name}' is not known to the server, which takes it as --host-policy={name},cpu-cores=…"
        for name in asked
        if name not in context.host_policies
    ]
    return notes
