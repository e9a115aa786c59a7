"""Where each instance of a model runs, and what it asks of its host: `instance_group`, one entry an instance."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from serving.job import Job

if TYPE_CHECKING:
    pass


_Group = ModelInstanceGroup
_KINDS = {_Group.KIND_GPU: "GPU", _Group.KIND_MODEL: "MODEL"}


@dataclass(frozen=True, slots=True)
class Resource:
    """What an instance takes of the rate limiter while it runs a batch. One that is not global is each device's own."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """One instance.

    `kind` as the group asks: CPU, GPU or MODEL. `gpu` is the device that it is on, None for the CPU: also for kind GPU
    where there is no GPU. `is_spillover`: a CPU instance of a model that has GPU instances too, which come first.
    `is_passive`: it is there, and takes no requests. `priority` of the rate limiter, 0 the default and highest.
    """

    name: str
    kind: str = "CPU"
    gpu: int | None = None
    is_spillover: bool = False
    is_passive: bool = False
    host_policy: str = ""
    resources: tuple[Resource, ...] = ()
    priority: int = 0
    profiles: tuple[str, ...] = ()


def placements_of(config: ModelConfig, num_gpus: int) -> list[Placement]:
    """One for each instance that the groups ask for, named as Triton names them; a single one where there are none.

    `num_gpus` is how many GPUs the backend can use. A group of GPUs that names none is on all of them.
    """
    groups = list(config.instance_group) or [_Group(name=config.name, kind=_Group.KIND_CPU, count=1)]
    has_gpu_group = any(_wants_gpu(group, num_gpus) for group in groups)
    return [place for group in groups for place in _of_group(group, config.name, num_gpus, has_gpu_group)]


def _of_group(group: ModelInstanceGroup, model: str, num_gpus: int, has_gpu_group: bool) -> list[Placement]:
    wants_gpu = _wants_gpu(group, num_gpus)
    devices: list[int | None] = [None]
    if wants_gpu:
        asked = list(group.gpus) or list(range(num_gpus)) or [0]
        devices = [gpu if num_gpus else None for gpu in asked]
    limiter = group.rate_limiter
    return [
        Placement(
            name=f"{group.name or model}_{number}",
            kind="GPU" if wants_gpu else _KINDS.get(group.kind, "CPU"),
            gpu=device,
            is_spillover=has_gpu_group and group.kind == _Group.KIND_CPU,
            is_passive=group.passive,
            host_policy=group.host_policy,
            resources=tuple(Resource(each.name, each.count, getattr(each, "global")) for each in limiter.resources),
            priority=limiter.priority,
            profiles=tuple(group.profile),
        )
        for number, device in enumerate(device for device in devices for _ in range(max(group.count, 1)))
    ]


def _wants_gpu(group: ModelInstanceGroup, num_gpus: int) -> bool:
    return bool(group.kind == _Group.KIND_GPU or (group.kind == _Group.KIND_AUTO and num_gpus > 0))


class Instance(ABC):
    """One copy of a model that runs one batch at a time: what `serving/batching` schedules onto."""

    name: str
    placement: Placement | None = None
    """Where it runs; None where nothing depends on it."""

    num_starts: int = 0
    """How often what it runs in has started: with every start, all that a model kept of its sequences is gone."""

    @property
    def is_ready(self) -> bool:
        """Whether it takes a batch now or will: false while its process is being restarted."""
        return True

    @abstractmethod
    def execute(self, jobs: list[Job], done: Callable[[], None]) -> None:
        """Run `jobs` as one batch, on the event loop, without blocking it and without raising.

        Every job gets its responses, the last one final; errors go to the jobs. `done` is called once, when the
        instance takes the next batch (a decoupled model may then still be answering). Sets the times in the jobs.
        A job cancelled meanwhile still ends with a final response, which nobody sees. In place of a final response a
        job may be given back with `Job.reschedule`.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free it; jobs under way end in an error. Idempotent."""
