"""Which fields of config.pbtxt Sluice obeys, and why not the others: what is given and not obeyed is said at load."""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from pipelines.repository.completion import ENSEMBLE, LLM_BACKENDS, has_gpu


@dataclass(frozen=True, slots=True)
class Unobeyed:
    """`reason` in words for whoever wrote the configuration. Without `only_by`, it is so for every backend."""

    reason: str
    obeyed_by: frozenset[str] = frozenset()
    only_by: frozenset[str] = frozenset()

    def applies_to(self, backend: str) -> bool:
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
        "sequence_batching.direct.max_queue_delay_microseconds",
        "sequence_batching.oldest.max_candidate_sequences",
        "sequence_batching.oldest.preferred_batch_size",
        "sequence_batching.oldest.max_queue_delay_microseconds",
        "sequence_batching.max_sequence_idle_microseconds",
        "sequence_batching.control_input",
        "ensemble_scheduling.step.model_name",
        "ensemble_scheduling.step.model_version",
        "ensemble_scheduling.step.input_map",
        "ensemble_scheduling.step.output_map",
        "ensemble_scheduling.max_inflight_requests",
        "instance_group.name",
        "instance_group.kind",
        "instance_group.count",
        "default_model_filename",
        "metric_tags",
        "parameters",
        "model_transaction_policy",
    }
)
"""By path from the top; a message stands for everything in it."""

_ONNX = frozenset({"onnxruntime"})
_PLACED = frozenset({"onnxruntime", "python"})
_NO_TENSORRT = "only TensorRT engines have it"
_NO_COPIES = "tensors are not copied between devices"

NOT_OBEYED = {
    "runtime": Unobeyed("a backend is chosen by its name"),
    "input.format": Unobeyed("backends get dims as they are"),
    "input.is_shape_tensor": Unobeyed(_NO_TENSORRT),
    "input.is_non_linear_format_io": Unobeyed(_NO_TENSORRT),
    "output.is_shape_tensor": Unobeyed(_NO_TENSORRT),
    "output.is_non_linear_format_io": Unobeyed(_NO_TENSORRT),
    "batch_input": Unobeyed("batches carry no inputs of their own"),
    "batch_output": Unobeyed("outputs are split by rows"),
    "optimization.graph": Unobeyed("the backend has no graph to optimize", obeyed_by=_ONNX),
    "optimization.priority": Unobeyed("models share the processors evenly"),
    "optimization.cuda": Unobeyed(_NO_COPIES),
    "optimization.execution_accelerators.gpu_execution_accelerator": Unobeyed("there is none for this backend"),
    "optimization.execution_accelerators.cpu_execution_accelerator": Unobeyed(
        "there is none for this backend", obeyed_by=_ONNX
    ),
    "optimization.input_pinned_memory": Unobeyed(_NO_COPIES),
    "optimization.output_pinned_memory": Unobeyed(_NO_COPIES),
    "optimization.gather_kernel_buffer_threshold": Unobeyed(_NO_COPIES),
    "optimization.eager_batching": Unobeyed("batches are gathered when an instance is free"),
    "sequence_batching": Unobeyed("an engine batches in flight and keeps no sequences", only_by=LLM_BACKENDS),
    "sequence_batching.direct.minimum_slot_utilization": Unobeyed("a batch waits for the delay alone"),
    "sequence_batching.oldest.preserve_ordering": Unobeyed("the order within each sequence is kept, no other"),
    "sequence_batching.state": Unobeyed("models keep the state of their sequences themselves"),
    "sequence_batching.iterative_sequence": Unobeyed("a request runs once"),
    "ensemble_scheduling.step.model_namespace": Unobeyed("models have one namespace"),
    "instance_group.rate_limiter": Unobeyed("instances run whenever they are free"),
    "instance_group.gpus": Unobeyed("instances of this backend choose no GPU", obeyed_by=_PLACED),
    "instance_group.secondary_devices": Unobeyed("an instance has one device"),
    "instance_group.profile": Unobeyed(_NO_TENSORRT),
    "instance_group.passive": Unobeyed("every instance takes requests"),
    "instance_group.host_policy": Unobeyed("instances are not bound to processors"),
    "cc_model_filenames": Unobeyed("one file serves on every device"),
    "model_warmup": Unobeyed("models are served without a warm-up"),
    "model_operations": Unobeyed("the backend loads no libraries of operations", obeyed_by=_ONNX),
    "model_repository_agents": Unobeyed("folders are read as they are"),
    "response_cache": Unobeyed("every request is computed", only_by=LLM_BACKENDS | {ENSEMBLE}),
    "model_metrics": Unobeyed("histograms have fixed buckets"),
}
"""By path from the top; a message stands for everything in it."""


def unobeyed_note(config: ModelConfig) -> list[str]:
    """A sentence with every field that is given but not obeyed, and one where GPUs are asked for and there are none.

    Give it the configuration as it was written, without defaults.
    """
    found = dict.fromkeys(_unobeyed(config, "", config.backend or ENSEMBLE))
    notes = [f"not obeyed: {'; '.join(f'{path} ({NOT_OBEYED[path].reason})' for path in found)}"] if found else []
    if any(group.kind == ModelInstanceGroup.KIND_GPU for group in config.instance_group) and not has_gpu():
        notes.append("there is no GPU, instances of KIND_GPU run on the CPU")
    return notes


def _unobeyed(message: Message, prefix: str, backend: str) -> Iterator[str]:
    """The paths of what is set and not obeyed; of such a message only itself."""
    for field, value in message.ListFields():
        path = prefix + field.name
        rule = NOT_OBEYED.get(path)
        if rule is not None and rule.applies_to(backend):
            yield path
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for inner in value if field.is_repeated else [value]:
                yield from _unobeyed(inner, f"{path}.", backend)
