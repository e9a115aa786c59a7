"""How much of each GPU's memory the engines' processes hold."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from prometheus_client.core import Metric

from gateway.telemetry.families import GAUGE, Labels, family
from pipelines.llm.model import LlmModel
from serving.model import Model

_FAMILY = "sluice_gpu_process_memory_bytes"
_PROC = Path("/proc")
_PARENT_FIELD = 1
"""Of /proc/PID/stat, after the program's name."""


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A process that uses a GPU. `lineage` is its id, its parent's, and so on up to the first process."""

    lineage: tuple[int, ...]
    memory_bytes: int


@runtime_checkable
class _HasProcess(Protocol):
    """An engine in a process of its own; the ranks of a model that is spread over GPUs descend from it."""

    @property
    def pid(self) -> int | None: ...


def lineage(pid: int, proc: Path = _PROC) -> tuple[int, ...]:
    """`pid` alone where it has ended, or is in another namespace."""
    found = [pid]
    while (parent := _parent(found[-1], proc)) > 0:
        found.append(parent)
    return tuple(found)


def _parent(pid: int, proc: Path) -> int:
    """0 for the first process, and for one that there is not."""
    try:
        text = (proc / str(pid) / "stat").read_text()
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[_PARENT_FIELD])


def engine_pids(models: Iterable[Model]) -> dict[int, str]:
    """The engines' processes, with the names of their models."""
    engines = ((model.engine, model.name) for model in models if isinstance(model, LlmModel))
    return {engine.pid: name for engine, name in engines if isinstance(engine, _HasProcess) and engine.pid is not None}


def process_memory(gpus: Sequence[tuple[str, Sequence[GpuProcess]]], engines: Mapping[int, str]) -> Iterator[Metric]:
    """`gpus`: the processes by uuid. Nothing where no engine uses a GPU."""
    values = list(_memory_by_model(gpus, engines))
    if values:
        yield family(_FAMILY, "GPU memory that the processes of a model's engine hold.", GAUGE, values)


def _memory_by_model(
    gpus: Sequence[tuple[str, Sequence[GpuProcess]]], engines: Mapping[int, str]
) -> Iterator[tuple[Labels, float]]:
    for uuid, processes in gpus:
        held: dict[str, int] = {}
        for process in processes:
            model = next((engines[pid] for pid in process.lineage if pid in engines), None)
            if model is not None:
                held[model] = held.get(model, 0) + process.memory_bytes
        for model, memory_bytes in held.items():
            yield {"gpu_uuid": uuid, "model": model}, memory_bytes
