"""Energy of this machine: its NVIDIA GPUs by NVML, its processors by RAPL."""

from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


class MeterError(Exception):
    """The meter is unavailable. The message has the reason."""


@dataclass(frozen=True, slots=True)
class Energy:
    """The energy of a run."""

    joules: dict[str, float]
    """Joules by the meter's name."""
    missing: str
    """The reasons of missing meters; empty if none is missing."""

    @property
    def total_j(self) -> float:
        return sum(self.joules.values())


class NvmlMeter:
    """Counts the energy of all GPUs. Raises MeterError where there are none, or none that counts energy."""

    def __init__(self) -> None:
        import pynvml

        try:
            pynvml.nvmlInit()
            self._gpus: list[Any] = [
                pynvml.nvmlDeviceGetHandleByIndex(number) for number in range(pynvml.nvmlDeviceGetCount())
            ]
            self._pynvml = pynvml
            self.read_j()
        except pynvml.NVMLError as error:
            raise MeterError(f"NVML: {error}") from None
        if not self._gpus:
            raise MeterError("NVML: no GPU")
        self.name = f"NVML, {len(self._gpus)} GPU{'s' if len(self._gpus) > 1 else ''}"

    def read_j(self) -> float:
        """Return joules since an arbitrary start."""
        return float(sum(self._pynvml.nvmlDeviceGetTotalEnergyConsumption(gpu) for gpu in self._gpus)) / 1e3


class RaplMeter:
    """Counts the energy of the processors' packages. Raises MeterError where it cannot be read."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._packages = [_Package(each) for each in sorted(folder.glob("intel-rapl:*")) if each.name.count(":") == 1]
        if not self._packages:
            raise MeterError(f"RAPL: nothing in {folder}")
        try:
            self.read_j()
        except OSError as error:
            raise MeterError(f"RAPL: {error.strerror}: {error.filename}") from None
        self.name = f"RAPL, {len(self._packages)} package{'s' if len(self._packages) > 1 else ''}"

    def read_j(self) -> float:
        """Return joules since an arbitrary start. Call it every few minutes at least: counters wrap."""
        return sum(package.read_uj() for package in self._packages) / 1e6


@dataclass(slots=True)
class _Package:
    """A counter of microjoules, which wraps at its largest value."""

    folder: Path
    _last: int | None = None
    _total: int = 0

    def read_uj(self) -> int:
        now = int((self.folder / "energy_uj").read_text())
        if self._last is not None:
            grown = now - self._last
            self._total += grown if grown >= 0 else grown + int((self.folder / "max_energy_range_uj").read_text())
        self._last = now
        return self._total


@dataclass(slots=True)
class EnergyWatch:
    """Measures from its making to `finish`."""

    _meters: list["NvmlMeter | RaplMeter"] = field(default_factory=list)
    _starts_j: list[float] = field(default_factory=list)
    _missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        kinds: tuple[type[NvmlMeter] | type[RaplMeter], ...] = (NvmlMeter, RaplMeter)
        for kind in kinds:
            try:
                self._meters.append(kind())
            except MeterError as error:
                self._missing.append(str(error))
        self._starts_j = [meter.read_j() for meter in self._meters]

    def update(self) -> None:
        """Read the meters, so that none wraps unseen."""
        for meter in self._meters:
            with suppress(OSError):
                meter.read_j()

    def finish(self) -> Energy:
        joules = {meter.name: meter.read_j() - start for meter, start in zip(self._meters, self._starts_j, strict=True)}
        return Energy(joules, "; ".join(self._missing))
