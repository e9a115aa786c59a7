"""Instances of a model: where each runs (`instance_group`, `--host-policy`), and the interface that runs batches."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from sluice.errors import invalid_argument
from sluice.serving.job import InferJob

_NODES = Path("/sys/devices/system/node")
_Group = ModelInstanceGroup
_KINDS = {_Group.KIND_GPU: "GPU", _Group.KIND_MODEL: "MODEL"}


@dataclass(frozen=True, slots=True)
class Resource:
    """A resource that an instance holds while it runs. A global one exists once, others once for each device."""

    name: str
    count: int
    is_global: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where one instance runs.

    `kind` is the group's: CPU, GPU or MODEL. `gpu` is the device, None for the CPU, also for kind GPU where there is no
    GPU. `is_spillover` marks a CPU instance of a model that has GPU instances too, which come first. A passive instance
    is loaded and takes no requests. `priority` is for the rate limiter; 0 is the default and the highest.
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


def place_instances(config: ModelConfig, num_gpus: int) -> list[Placement]:
    """Return a placement for each instance of the groups, named as Triton names them; without groups, a single one.

    `num_gpus` counts the GPUs that the backend can use. A GPU group that names no GPUs is on all of them.
    """
    groups = list(config.instance_group) or [_Group(name=config.name, kind=_Group.KIND_CPU, count=1)]
    has_gpu_group = any(_wants_gpu(group, num_gpus) for group in groups)
    return [each for group in groups for each in _place_group(group, config.name, num_gpus, has_gpu_group)]


def match_placements(
    present: Iterable[Placement], wanted: Iterable[Placement]
) -> tuple[list[tuple[Placement, Placement]], list[Placement]]:
    """Return the pairs of a present placement and an equal wanted one, and the wanted ones that are new.

    As in Triton, names do not count: an instance stays under its old one. A place that is left only to GPUs or is no
    longer so is the same place.
    """
    left, pairs, new = list(present), [], []
    for each in wanted:
        same = next((other for other in left if _anonymous(other) == _anonymous(each)), None)
        if same is None:
            new.append(each)
            continue
        left = [other for other in left if other is not same]
        pairs.append((same, replace(each, name=same.name)))
    return pairs, new


def _anonymous(placement: Placement) -> Placement:
    return replace(placement, name="", is_spillover=False)


def _place_group(group: ModelInstanceGroup, model: str, num_gpus: int, has_gpu_group: bool) -> list[Placement]:
    wants_gpu = _wants_gpu(group, num_gpus)
    devices: list[int | None] = [None]
    if wants_gpu:
        gpus = list(group.gpus) or list(range(num_gpus)) or [0]
        devices = [gpu if num_gpus else None for gpu in gpus]
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
    """One copy of a model, which runs one batch at a time. `serving/batching` schedules onto instances."""

    name: str
    placement: Placement | None = None
    """Where it runs; None where nothing depends on it."""

    num_starts: int = 0
    """Starts of its process so far. Every start loses the state that the model kept of its sequences."""

    @property
    def is_ready(self) -> bool:
        """Whether it can run a batch now or after the present one: false while its process is being restarted."""
        return True

    @property
    def wants_first(self) -> bool:
        """Whether a batch of the first request alone is worth its while: it works elsewhere, and so quickly that it is
        done before the others of the event loop's turn are read."""
        return False

    @property
    def is_idle(self) -> bool:
        """Whether it has no request. Models that update their instances close one only then."""
        return True

    @abstractmethod
    def execute(self, jobs: list[InferJob], done: Callable[[], None]) -> None:
        """Run `jobs` as one batch, on the event loop, without blocking it and without raising.

        Every job gets its responses, the last one final; errors go to the jobs. `done` is called once, when the
        instance can take the next batch (a decoupled model may then still be responding). The instance sets the times
        in the jobs. A job cancelled meanwhile still ends with a final response, which is dropped. In place of a final
        response, `InferJob.reschedule` may return a job to its scheduler.
        """

    @abstractmethod
    async def close(self) -> None:
        """Free its memory and processes; running jobs end in an error. Idempotent."""


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """Cores and a NUMA node that instances are bound to. Empty `cores` and `numa_node` None bind to nothing."""

    name: str
    cores: frozenset[int] = frozenset()
    numa_node: int | None = None

    def bind(self, pid: int = 0) -> None:
        """Bind a process to the cores; with 0, the calling thread and the threads that it starts from now on.

        Memory comes from the node of the core that first writes to it. Raises OSError where the host forbids binding.
        """
        if self.cores:
            os.sched_setaffinity(pid, self.cores)


def choose_host_policy(placement: Placement, policies: Mapping[str, HostPolicy]) -> HostPolicy | None:
    """Return the policy of an instance: the one its group names, else as in Triton `gpu_ID` or `cpu`; None for none."""
    default = "cpu" if placement.gpu is None else f"gpu_{placement.gpu}"
    return policies.get(placement.host_policy or default)


def parse_host_policies(texts: Iterable[str]) -> dict[str, HostPolicy]:
    """Parse `NAME,SETTING=VALUE` texts; settings of one name add up. Raises INVALID.

    Settings are `numa-node`, a number, and `cpu-cores`, cores and ranges of them: 0-3,8. A node without cores means
    all of its cores. The calling thread must be allowed to use the cores.
    """
    policies: dict[str, HostPolicy] = {}
    for text in texts:
        name, comma, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not (name and comma and key and equals and value):
            raise invalid_argument(f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}")
        policies[name] = _with_setting(policies.get(name, HostPolicy(name)), key, value)
    allowed = frozenset(os.sched_getaffinity(0))
    return {name: replace(policy, cores=_usable_cores(policy, allowed)) for name, policy in policies.items()}


def _usable_cores(policy: HostPolicy, allowed: frozenset[int]) -> frozenset[int]:
    missing = policy.cores - allowed
    if missing:
        raise invalid_argument(
            f"host policy '{policy.name}' asks for cores {_listed(missing)}, and the server may use {_listed(allowed)}"
        )
    if policy.cores or policy.numa_node is None:
        return policy.cores
    cores = _node_cores(policy.numa_node, policy.name) & allowed
    if not cores:
        raise invalid_argument(
            f"host policy '{policy.name}': the server may use no core of NUMA node {policy.numa_node}"
        )
    return cores


def _with_setting(policy: HostPolicy, key: str, value: str) -> HostPolicy:
    if key == "numa-node":
        if not value.isdecimal():
            raise invalid_argument(f"Parsing 'numa-node' value: Can't parse '{value}' to integer")
        return replace(policy, numa_node=int(value))
    if key == "cpu-cores":
        return replace(policy, cores=parse_cores(value))
    raise invalid_argument(f"host policy '{policy.name}' has no setting '{key}', there are numa-node and cpu-cores")


def parse_cores(text: str) -> frozenset[int]:
    """Parse `0-3,8` into numbers. Raises INVALID."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        bounds = (first, last) if dash else (first, first)
        if not all(each.isdecimal() for each in bounds) or int(bounds[0]) > int(bounds[1]):
            raise invalid_argument(
                "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>', or one core, "
                f"with commas between several. Got {part}"
            )
        cores.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return frozenset(cores)


def _node_cores(node: int, policy: str) -> frozenset[int]:
    path = _NODES / f"node{node}" / "cpulist"
    try:
        text = path.read_text()
    except OSError:
        raise invalid_argument(f"host policy '{policy}' asks for NUMA node {node}, which this host has not") from None
    return parse_cores(text) if text.strip() else frozenset()


def _listed(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))
