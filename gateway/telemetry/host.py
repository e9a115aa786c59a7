"""The host's processor and memory, out of Linux's /proc; elsewhere there are no numbers."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from prometheus_client.core import GaugeMetricFamily, Metric

_UTILIZATION, _TOTAL, _USED = "nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"
NAMES = frozenset({_UTILIZATION, _TOTAL, _USED})
_PROC = Path("/proc")
_KIB = 1024
_IDLE_FIELDS = slice(3, 5)
"""Of the first line of /proc/stat: idle, and waiting for input or output."""
_BUSY_FIELDS = slice(0, 8)
"""All of it but the time of guests, which is part of the user's."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    total_bytes: int
    used_bytes: int


def host_memory(proc: Path = _PROC) -> HostMemory | None:
    """What there is, and what is not available to new programs."""
    try:
        lines = (proc / "meminfo").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in lines)}
    total = sizes["MemTotal"]
    return HostMemory(total, total - sizes["MemAvailable"])


class CpuUtilization:
    """How busy all processors were since it was last asked."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._stat = proc / "stat"
        self._last = self._read()

    def sample(self) -> float | None:
        """From 0 to 1; None where it cannot be told."""
        now, last = self._read(), self._last
        self._last = now
        if now is None or last is None:
            return None
        total = now[1] - last[1]
        return (now[0] - last[0]) / total if total > 0 else 0.0

    def _read(self) -> tuple[int, int] | None:
        """Busy and whole time, in ticks since the host's start."""
        try:
            with self._stat.open() as file:
                fields = [int(field) for field in file.readline().split()[1:]]
        except OSError:
            return None
        total = sum(fields[_BUSY_FIELDS])
        return total - sum(fields[_IDLE_FIELDS]), total


class HostMetrics:
    """Triton's families of the machine, read again once `interval_s` has passed: several scrapers see the same."""

    def __init__(self, interval_s: float, proc: Path = _PROC, clock: Callable[[], float] = monotonic) -> None:
        self._interval_s = interval_s
        self._proc = proc
        self._clock = clock
        self._cpu = CpuUtilization(proc)
        self._utilization: float | None = None
        self._memory: HostMemory | None = None
        self._read_at: float | None = None

    def families(self) -> Iterator[Metric]:
        now = self._clock()
        if self._read_at is None or now - self._read_at >= self._interval_s:
            self._read_at = now
            self._utilization, self._memory = self._cpu.sample(), host_memory(self._proc)
        memory = self._memory
        if self._utilization is not None:
            yield GaugeMetricFamily(_UTILIZATION, "CPU utilization rate [0.0 - 1.0]", self._utilization)
        if memory is not None:
            yield GaugeMetricFamily(_TOTAL, "CPU total memory (RAM), in bytes", memory.total_bytes)
            yield GaugeMetricFamily(_USED, "CPU used memory (RAM), in bytes", memory.used_bytes)
