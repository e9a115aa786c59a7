"""Memory, threads and descriptors of the fleet's processes, by what each process is."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass

import psutil

from sluice.load.chaos.fleet import ENGINE, PYTHON_WORKER, WORKER, Fleet

_MORE_RSS, _MORE_RSS_MB = 1.5, 64.0
_MORE_THREADS, _MORE_DESCRIPTORS = 8, 32


@dataclass(frozen=True, slots=True)
class Size:
    """The resources of one part of the fleet: those of its largest process."""

    rss_mb: float = 0.0
    threads: int = 0
    descriptors: int = 0

    def joined(self, other: "Size") -> "Size":
        """Return the largest of each."""
        return Size(*(max(a, b) for a, b in zip(asdict(self).values(), asdict(other).values(), strict=True)))


@dataclass(frozen=True, slots=True)
class ProcessSize:
    """The size of one process, and which part of the fleet that is."""

    part: str
    pid: int
    size: Size


def measure(fleet: Fleet) -> dict[str, Size]:
    """Return the size of each part of the fleet but for its stores."""
    sizes: dict[str, Size] = {}
    for each in _measure(_parts(fleet)):
        sizes[each.part] = sizes.get(each.part, Size()).joined(each.size)
    return sizes


def measure_processes(fleet: Fleet) -> list[ProcessSize]:
    """Return the size of each process of the fleet, and of Redis."""
    redis = fleet.redis
    stores = [] if redis is None or not redis.program.is_running else [("redis", psutil.Process(redis.program.pid))]
    return list(_measure((*_parts(fleet), *stores)))


def _measure(parts: Iterable[tuple[str, psutil.Process]]) -> Iterator[ProcessSize]:
    for part, process in parts:
        try:
            with process.oneshot():
                size = Size(round(process.memory_info().rss / 1e6, 1), process.num_threads(), process.num_fds())
        except psutil.Error:  # it has just ended
            continue
        yield ProcessSize(part, process.pid, size)


def _parts(fleet: Fleet) -> Iterator[tuple[str, psutil.Process]]:
    for gateway in fleet.gateways:
        if not gateway.program.is_running:
            continue
        yield f"gateway {gateway.name}", psutil.Process(gateway.program.pid)
        for word, part in ((ENGINE, "engine"), (WORKER, "worker"), (PYTHON_WORKER, "python model")):
            yield from ((f"{part} of {gateway.name}", each) for each in gateway.processes(word))
    for launcher in fleet.launchers:
        if launcher.is_running:
            yield launcher.name, psutil.Process(launcher.pid)
            yield from ((f"process of {launcher.name}", each) for each in launcher.children(ENGINE))


def find_growth(before: dict[str, Size], after: dict[str, Size]) -> list[str]:
    """Say which parts have grown beyond the bound, or are gone. Pure.

    A part may have half as much memory again and 64 MB, 8 threads and 32 descriptors more than before the first fault.
    """
    found = [f"{part} is gone" for part in before.keys() - after.keys()]
    for part, size in after.items():
        first = before.get(part)
        if first is None:
            continue
        if size.rss_mb > first.rss_mb * _MORE_RSS + _MORE_RSS_MB:
            found.append(f"{part}: {first.rss_mb:.0f} MB have become {size.rss_mb:.0f}")
        if size.threads > first.threads + _MORE_THREADS:
            found.append(f"{part}: {first.threads} threads have become {size.threads}")
        if size.descriptors > first.descriptors + _MORE_DESCRIPTORS:
            found.append(f"{part}: {first.descriptors} descriptors have become {size.descriptors}")
    return found
