"""The server as the v2 protocol sees it, over HTTP and gRPC alike: its parts, and how it describes itself.

Descriptions are plain values in Triton's order of members, fit for JSON and for protobuf's constructors.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.api.v2.log_settings import LogSettings
from sluice.gateway.api.v2.shared_memory import SharedMemoryRegistry
from sluice.gateway.api.v2.trace_settings import TraceSettings
from sluice.gateway.calls import CallLog, is_visible
from sluice.gateway.plane.adapters import RuntimeAdapters
from sluice.gateway.plane.health import ServerHealth
from sluice.gateway.plane.models import ModelFinder
from sluice.gateway.plane.rooms import OtherProcesses
from sluice.gateway.telemetry.tracer import Tracer
from sluice.serving.model import Model
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.request import LATEST
from sluice.serving.spec import TensorSpec
from sluice.serving.statistics import BatchStatistics, Duration, InferStatistics, ResponseStatistics

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
"""The protocol's extensions as Triton lists them: it serves generate too, and does not list it."""
PROTOCOL_VERSION = "2.71.0"
"""The Triton release whose answers ours are compared with. Clients choose features by it."""
_DURATIONS = ("success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
_BATCH_DURATIONS = ("compute_input", "compute_infer", "compute_output")
_RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
_LEADING_INTEGER = re.compile(r"\s*([+-]?\d+)", re.ASCII)
_MAX_VERSION = 2**63 - 1
_MAX_DIGITS = 4000
"""More digits than any version has, and fewer than Python refuses to read."""


@dataclass(eq=False)
class V2Server:
    """The parts of a server that the v2 protocol reads and changes."""

    models: ModelFinder
    repository: ModelRepository
    health: ServerHealth
    calls: CallLog
    tracer: Tracer
    trace: TraceSettings
    log_settings: LogSettings
    shared_memory: SharedMemoryRegistry
    adapters: RuntimeAdapters
    name: str
    takes_model_files: bool = False
    """Whether clients may load models with files of their own."""
    elsewhere: OtherProcesses | None = None
    """None: the server has one process."""

    def is_model_ready(self, name: str, version: int = LATEST) -> bool:
        """Whether that version is loaded and would serve now; for an adapter, whether its model is."""
        try:
            return self.models.find(self.adapters.base_of(name) or name, version).is_ready
        except SluiceError:
            return False

    async def settle(self) -> None:
        """Wait until the server's other processes serve the models that this one does, and nothing that it traces."""
        if self.elsewhere is not None:
            await self.elsewhere.settle()

    async def statistics(self, name: str, version: int) -> dict[str, Any]:
        """Return the statistics of the visible models, of those called `name`, or of one version, over all processes.
        Raises INVALID where none is."""
        found = statistics([each for each in self.repository.models() if is_visible(each.name)], name, version)
        for other in () if self.elsewhere is None else await self.elsewhere.statistics():
            for own in found["model_stats"]:
                if (own["name"], own["version"]) == (other["name"], other["version"]):
                    _add_statistics(own, other)
        return found

    async def close(self) -> None:
        """Free shared memory, write and send the traces that are left, and restore the log."""
        self.shared_memory.close()
        self.trace.close()
        await self.trace.close_collector()
        self.log_settings.close()


def parse_version(text: str) -> int:
    """Parse a model's version by C's `strtol`, as Triton does; empty text is LATEST. Raises INVALID."""
    if not text:
        return LATEST
    match = _LEADING_INTEGER.match(text)
    if match is None or len(match[1]) > _MAX_DIGITS or abs(version := int(match[1])) > _MAX_VERSION:
        message = (
            f"failed to get model version from specified version string '{text}' (details: stol), "
            "version should be an integral value > 0"
        )
        raise SluiceError(ErrorCode.INVALID, message)
    if version < 0:
        message = f"invalid model version specified '{text}' , version should be an integral value > 0"
        raise SluiceError(ErrorCode.INVALID, message)
    return version


def server_metadata(name: str) -> dict[str, Any]:
    return {"name": name, "version": PROTOCOL_VERSION, "extensions": list(EXTENSIONS)}


def model_metadata(model: Model, versions: Sequence[int]) -> dict[str, Any]:
    """Return the inputs and outputs of `model`, with `versions` as its versions."""
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


def statistics(models: Iterable[Model], name: str = "", version: int = LATEST) -> dict[str, Any]:
    """Return the statistics of `models`, of those called `name`, or of one version. Raises INVALID where none is."""
    found = [model for model in models if not name or model.name == name]
    if name and not found:
        raise SluiceError(ErrorCode.INVALID, f"requested model '{name}' is not available")
    if name and version != LATEST:
        found = [model for model in found if model.version == version]
        if not found:
            raise SluiceError(ErrorCode.INVALID, f"requested model version is not available for model '{name}'")
    found.sort(key=lambda model: (model.name, model.version))
    return {"model_stats": [_model_statistics(model) for model in found]}


def _add_statistics(own: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Add what another process has counted."""
    for name, value in other.items():
        before = own.get(name)
        if before is None:
            own[name] = value
        elif name == "last_inference":
            own[name] = max(before, value)
        elif isinstance(value, dict):
            _add_statistics(before, value)
        elif isinstance(value, int) and name != "batch_size":
            own[name] = before + value
        elif name == "batch_stats":
            by_size = {each["batch_size"]: each for each in before}
            for each in value:
                _add_statistics(by_size.setdefault(each["batch_size"], {}), each)
            own[name] = [by_size[size] for size in sorted(by_size)]


def _model_statistics(model: Model) -> dict[str, Any]:
    counts = model.statistics
    return {
        "name": model.name,
        "version": str(model.version),
        "last_inference": counts.last_inference_ms,
        "inference_count": counts.inference_count,
        "execution_count": counts.execution_count,
        "inference_stats": _durations(counts.infer, _DURATIONS),
        "response_stats": {
            str(place): _durations(counts.responses[place], _RESPONSE_DURATIONS) for place in sorted(counts.responses)
        },
        "batch_stats": [
            {"batch_size": rows, **_durations(counts.batches[rows], _BATCH_DURATIONS)}
            for rows in sorted(counts.batches)
        ],
        "memory_usage": [],
    }


def _durations(
    counts: InferStatistics | BatchStatistics | ResponseStatistics, names: Sequence[str]
) -> dict[str, dict[str, int]]:
    durations: dict[str, Duration] = {name: getattr(counts, name) for name in names}
    return {name: {"count": each.count, "ns": each.ns} for name, each in durations.items()}
