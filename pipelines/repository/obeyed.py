"""Which fields of config.pbtxt Sluice obeys, and why not the others: what is given and not obeyed is said at load."""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from pipelines.repository.completion import ENSEMBLE, LLM_BACKENDS, has_gpu
from pipelines.repository.config_locations import NOWHERE, Locations
from pipelines.repository.config_text import CONFIG_FILENAME
from pipelines.repository.findings import Finding


@dataclass(frozen=True, slots=True)
class Unobeyed:
    """`reason` in words for whoever wrote the configuration. Without `only_by`, it is so for every backend."""

    reason: str
    obeyed_by: frozenset[str] = frozenset()
    only_by: frozenset[str] = frozenset()

    needs_gpu: bool = False
    """Whether `obeyed_by` holds only on a machine with a GPU."""

    def applies_to(self, backend: str) -> bool:
        if self.needs_gpu and not has_gpu():
            return True
        return backend not in self.obeyed_by and (not self.only_by or backend in self.only_by)


OBEYED = frozenset(
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
    }
)
"""By path from the top; a message stands for everything in it."""

_ONNX = frozenset({"onnxruntime"})
_PLACED = frozenset({"onnxruntime", "python", "pytorch", "tensorrt"})
_ARRAYS = frozenset({"onnxruntime", "openvino", "pytorch", "tensorflow", "tensorrt"})
_TENSORRT = frozenset({"tensorrt"})
_NO_TENSORRT = "only TensorRT plans have it"
_NO_SHAPE_TENSORS = "no backend takes shape tensors"
_LINEAR = "tensors are laid out row by row"
_NO_COPIES = "tensors are not copied between devices"

NOT_OBEYED = {
    "runtime": Unobeyed("a backend is chosen by its name"),
    "input.format": Unobeyed("backends get dims as they are"),
    "input.is_shape_tensor": Unobeyed(_NO_SHAPE_TENSORS),
    "input.is_non_linear_format_io": Unobeyed(_LINEAR),
    "output.is_shape_tensor": Unobeyed(_NO_SHAPE_TENSORS),
    "output.is_non_linear_format_io": Unobeyed(_LINEAR),
    "batch_input": Unobeyed("batches of this backend carry no inputs of their own", obeyed_by=_ARRAYS),
    "batch_output": Unobeyed("this backend's outputs are its own to split", obeyed_by=_ARRAYS),
    "optimization.graph": Unobeyed("the backend has no graph to optimize", obeyed_by=_ONNX),
    "optimization.priority": Unobeyed("models share the processors evenly"),
    "optimization.cuda": Unobeyed(_NO_COPIES),
    "optimization.execution_accelerators.gpu_execution_accelerator": Unobeyed(
        "there is none for this backend, or no GPU", obeyed_by=_ONNX, needs_gpu=True
    ),
    "optimization.execution_accelerators.cpu_execution_accelerator": Unobeyed(
        "there is none for this backend", obeyed_by=_ONNX
    ),
    "optimization.input_pinned_memory": Unobeyed(_NO_COPIES),
    "optimization.output_pinned_memory": Unobeyed(_NO_COPIES),
    "optimization.gather_kernel_buffer_threshold": Unobeyed(_NO_COPIES),
    "optimization.eager_batching": Unobeyed("batches are gathered when an instance is free"),
    "sequence_batching": Unobeyed("an engine batches in flight and keeps no sequences", only_by=LLM_BACKENDS),
    "sequence_batching.state.use_same_buffer_for_input_output": Unobeyed("each request's state is a tensor of its own"),
    "sequence_batching.state.use_growable_memory": Unobeyed("each request's state is a tensor of its own"),
    "instance_group.rate_limiter": Unobeyed("an engine plans its steps itself", only_by=LLM_BACKENDS | {ENSEMBLE}),
    "instance_group.gpus": Unobeyed("instances of this backend choose no GPU", obeyed_by=_PLACED),
    "instance_group.secondary_devices": Unobeyed("an instance has one device"),
    "instance_group.profile": Unobeyed(_NO_TENSORRT, obeyed_by=_TENSORRT),
    "instance_group.passive": Unobeyed("it has no instances", only_by=LLM_BACKENDS | {ENSEMBLE}),
    "instance_group.host_policy": Unobeyed(
        "instances of this backend are not bound to processors", obeyed_by=_ARRAYS | {"python"}
    ),
    "cc_model_filenames": Unobeyed("one file serves on every device", obeyed_by=_TENSORRT),
    "model_operations": Unobeyed("the backend loads no libraries of operations", obeyed_by=_ONNX),
    "response_cache": Unobeyed("every request is computed", only_by=LLM_BACKENDS | {ENSEMBLE}),
}
"""By path from the top; a message stands for everything in it."""


def unobeyed_note(config: ModelConfig, locations: Locations = NOWHERE) -> list[str]:
    """A sentence with every field that is given but not obeyed, and one where GPUs are asked for and there are none.

    Give it the configuration as it was written, without defaults, and `locations` of its text for the lines.
    """
    found: dict[str, int | None] = {}
    for path, place in _unobeyed(config, "", "", config.backend or ENSEMBLE):
        found.setdefault(path, locations.line_of(place))
    places = {path: f"{CONFIG_FILENAME}:{line}: " if line else "" for path, line in found.items()}
    listed = (f"{path} ({place}{NOT_OBEYED[path].reason})" for path, place in places.items())
    notes = [f"not obeyed: {'; '.join(listed)}"] if found else []
    return [*notes, *(each.message for each in _without_gpu(config))]


def unobeyed_findings(config: ModelConfig) -> list[Finding]:
    """The same one by one."""
    found: dict[str, str] = {}
    for path, place in _unobeyed(config, "", "", config.backend or ENSEMBLE):
        found.setdefault(path, place)
    named = [Finding(f"{path} is not obeyed: {NOT_OBEYED[path].reason}", place) for path, place in found.items()]
    return [*named, *_without_gpu(config)]


def _without_gpu(config: ModelConfig) -> list[Finding]:
    groups = config.instance_group
    asking = [index for index, group in enumerate(groups) if group.kind == ModelInstanceGroup.KIND_GPU]
    if not asking or has_gpu():
        return []
    return [Finding("there is no GPU, instances of KIND_GPU run on the CPU", f"instance_group[{asking[0]}].kind")]


def _unobeyed(message: Message, prefix: str, place: str, backend: str) -> Iterator[tuple[str, str]]:
    """The paths of what is set and not obeyed, without and with numbers; of such a message only its own."""
    for field, value in message.ListFields():
        path = prefix + field.name
        rule = NOT_OBEYED.get(path)
        if rule is not None and rule.applies_to(backend):
            yield path, place + field.name
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for index, inner in enumerate(value if field.is_repeated else [value]):
                yield from _unobeyed(inner, f"{path}.", f"{place}{field.name}[{index}].", backend)
