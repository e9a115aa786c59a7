"""`--host-policy`: which processors and memory an instance keeps to."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HostPolicy:
    """`cores` empty: any. `numa_node` None: any."""

    name: str
    cores: frozenset[int] = frozenset()
    numa_node: int | None = None
