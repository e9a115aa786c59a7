"""What the server says of itself and of its models, as plain values in Triton's order of members.

They are JSON as they stand, and protobuf's constructors take them too.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from serving.model import Model
from serving.repository.managed_model import IndexEntry
from serving.request import LATEST
from serving.spec import TensorSpec
from serving.statistics import BatchStatistics, Duration, InferStatistics, ResponseStatistics
from sluice.errors import ErrorCode, SluiceError

EXTENSIONS = (
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
)
"""Of the protocol, as Triton lists them: it serves generate too, and does not say so."""

PROTOCOL_VERSION = "2.51.0"
"""The Triton release whose answers ours are compared with. Clients choose by it what they may ask."""

_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")
_RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Who answers."""

    name: str
    version: str
    extensions: tuple[str, ...] = EXTENSIONS


def server_metadata(identity: ServerIdentity) -> dict[str, Any]:
    """The server's name, version and extensions."""
    return {"name": identity.name, "version": identity.version, "extensions": list(identity.extensions)}


def model_metadata(model: Model, versions: Sequence[int]) -> dict[str, Any]:
    """What `model` takes and gives; `versions` are those that were asked about."""
    spec = model.spec
    is_batched = spec.max_batch_size > 0
    return {
        "name": spec.name,
        "versions": [str(version) for version in versions],
        "platform": spec.platform,
        "inputs": [_tensor(each, is_batched) for each in spec.inputs.values()],
        "outputs": [_tensor(each, is_batched) for each in spec.outputs.values()],
    }


def _tensor(tensor: TensorSpec, is_batched: bool) -> dict[str, Any]:
    shape = [-1, *tensor.dims] if is_batched else list(tensor.dims)
    return {"name": tensor.name, "datatype": tensor.data_type.name, "shape": shape}


def index_row(entry: IndexEntry) -> dict[str, str]:
    """A row of the repository index; a model that was never loaded has its name alone."""
    if entry.state is None:
        return {"name": entry.name}
    row = {"name": entry.name, "version": str(entry.version), "state": entry.state.value}
    return {**row, "reason": entry.reason} if entry.reason else row


def statistics(models: Iterable[Model], name: str = "", version: int = LATEST) -> dict[str, Any]:
    """Of every model in `models`, of those called `name`, or of one version. Raises INVALID where there is none."""
    found = [model for model in models if not name or model.name == name]
    if name and not found:
        raise SluiceError(ErrorCode.INVALID, f"requested model '{name}' is not available")
    if name and version != LATEST:
        found = [model for model in found if model.version == version]
        if not found:
            raise SluiceError(ErrorCode.INVALID, f"requested model version is not available for model '{name}'")
    found.sort(key=lambda model: (model.name, model.version))
    return {"model_stats": [_model_statistics(model) for model in found]}


def _model_statistics(model: Model) -> dict[str, Any]:
    counted = model.statistics
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": counted.last_inference_ms,
        "inference_count": counted.inference_count,
        "execution_count": counted.execution_count,
        "inference_stats": _durations(counted.infer, _DURATIONS),
        "response_stats": {
            str(place): _durations(counted.responses[place], _RESPONSE_DURATIONS) for place in sorted(counted.responses)
        },
        "batch_stats": [
            {"batch_size": rows, **_durations(counted.batches[rows], _BATCH_DURATIONS)}
            for rows in sorted(counted.batches)
        ],
        "memory_usage": [],
    }


def _durations(
    counted: InferStatistics | BatchStatistics | ResponseStatistics, names: Sequence[str]
) -> dict[str, dict[str, int]]:
    return {name: _duration(getattr(counted, name)) for name in names}


def _duration(duration: Duration) -> dict[str, int]:
    return {"count": duration.count, "ns": duration.ns}
