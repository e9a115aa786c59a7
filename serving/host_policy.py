"""`--host-policy`: which processors and memory an instance keeps to."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from serving.instance import Placement
from sluice.errors import ErrorCode, SluiceError

_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """`cores` empty: any. `numa_node` None: any."""

    name: str
    cores: frozenset[int] = frozenset()
    numa_node: int | None = None

    def bind(self, pid: int = 0) -> None:
        """Keep a process to its cores, or with 0 the calling thread; threads started from there follow.

        Memory comes from the node of the core that first writes to it. Raises OSError where the host forbids it.
        """
        if self.cores:
            os.sched_setaffinity(pid, self.cores)


def policy_of(placement: Placement, policies: Mapping[str, HostPolicy]) -> HostPolicy | None:
    """What an instance there keeps to: what its group names, else as in Triton `gpu_ID`, or `cpu`; None for nothing."""
    default = "cpu" if placement.gpu is None else f"gpu_{placement.gpu}"
    return policies.get(placement.host_policy or default)


def parse_host_policies(texts: Iterable[str]) -> dict[str, HostPolicy]:
    """Of `NAME,SETTING=VALUE` each; settings of one name add up. Raises SluiceError INVALID.

    Settings are `numa-node`, a number, and `cpu-cores`, cores and ranges of them: 0-3,8. A node without cores means
    all of its cores. Cores are checked against those that the calling thread may use.
    """
    policies: dict[str, HostPolicy] = {}
    for text in texts:
        name, comma, setting = text.partition(",")
        key, equals, value = setting.partition("=")
        if not (name and comma and key and equals and value):
            raise _invalid(f"--host-policy option format is '<policy name>,<setting>=<value>'. Got {text}")
        policies[name] = _with(policies.get(name, HostPolicy(name)), key, value)
    allowed = frozenset(os.sched_getaffinity(0))
    return {name: replace(policy, cores=_cores_of(policy, allowed)) for name, policy in policies.items()}


def _cores_of(policy: HostPolicy, allowed: frozenset[int]) -> frozenset[int]:
    missing = policy.cores - allowed
    if missing:
        raise _invalid(
            f"host policy '{policy.name}' asks for cores {_listed(missing)}, and the server may use {_listed(allowed)}"
        )
    if policy.cores or policy.numa_node is None:
        return policy.cores
    cores = _cores_of_node(policy.numa_node, policy.name) & allowed
    if not cores:
        raise _invalid(f"host policy '{policy.name}': the server may use no core of NUMA node {policy.numa_node}")
    return cores


def _with(policy: HostPolicy, key: str, value: str) -> HostPolicy:
    if key == "numa-node":
        if not value.isdecimal():
            raise _invalid(f"Parsing 'numa-node' value: Can't parse '{value}' to integer")
        return replace(policy, numa_node=int(value))
    if key == "cpu-cores":
        return replace(policy, cores=parse_cores(value))
    raise _invalid(f"host policy '{policy.name}' has no setting '{key}', there are numa-node and cpu-cores")


def parse_cores(text: str) -> frozenset[int]:
    """`0-3,8` as numbers. Raises SluiceError INVALID."""
    cores: set[int] = set()
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        bounds = (first, last) if dash else (first, first)
        if not all(each.isdecimal() for each in bounds) or int(bounds[0]) > int(bounds[1]):
            raise _invalid(
                "host policy setting 'cpu-cores' format is '<lower_cpu_core_id>-<upper_cpu_core_id>', or one core, "
                f"with commas between several. Got {part}"
            )
        cores.update(range(int(bounds[0]), int(bounds[1]) + 1))
    return frozenset(cores)


def _cores_of_node(node: int, policy: str) -> frozenset[int]:
    path = _NODES / f"node{node}" / "cpulist"
    try:
        text = path.read_text()
    except OSError:
        raise _invalid(f"host policy '{policy}' asks for NUMA node {node}, which this host has not") from None
    return parse_cores(text) if text.strip() else frozenset()


def _listed(cores: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(cores)))


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
