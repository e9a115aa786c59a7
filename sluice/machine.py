"""Reads the machine's resources: NVIDIA GPUs, cores, and the memory that this process may still take."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")
_DEVICES = Path("/dev")
_KIB = 1024


def num_gpus(devices: Path = _DEVICES) -> int:
    """Return the number of NVIDIA GPUs that the driver shows as device files, or the fewer that CUDA_VISIBLE_DEVICES
    leaves visible. A library may be able to use fewer of them."""
    return len(visible_gpus(devices))


def visible_gpus(devices: Path = _DEVICES) -> tuple[str, ...]:
    """Return those GPUs, each in CUDA_VISIBLE_DEVICES' words for it."""
    found = sum(1 for each in devices.glob("nvidia[0-9]*") if _GPU.fullmatch(each.name))
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")  # noqa: TID251 - CUDA's own
    names = map(str, range(found)) if listed is None else takewhile(_names_gpu, map(str.strip, listed.split(",")))
    return tuple(names)[:found]


def _names_gpu(text: str) -> bool:
    """Whether an entry of CUDA_VISIBLE_DEVICES names a GPU; CUDA reads none after the first that does not."""
    return text.isdecimal() or text.startswith(("GPU-", "MIG-"))


@dataclass(frozen=True, slots=True)
class _MemoryController:
    """The memory controller of one version of control groups. Files are named from a group's folder."""

    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """Fields of memory.stat that count pages of files, which the kernel drops before it refuses memory."""


_CGROUP = "sys/fs/cgroup"
"""The mount point of control groups of version 2, and in it the controllers of version 1."""
_V2 = _MemoryController("memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _MemoryController(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes that can be allocated without swapping or being killed: the machine's, or less where a control
    group has a limit. The page cache counts as available.
    """
    in_machine = _read_fields(root / "proc/meminfo")["MemAvailable:"] * _KIB
    return max(0, min([in_machine, *_bytes_left_in_groups(root)]))


def num_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may keep busy: those that it may run on, or fewer where a control
    group gives it less time, as a container's CPU limit does. Threads beyond that are stopped for the rest of each
    period."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min([allowed, *(ceil(each) for each in _core_quotas(root))]))


def _core_quotas(root: Path) -> Iterator[float]:
    """Yield the cores' worth of time of each control group of this process that has a limit."""
    for is_v2, folder in _groups(root, "cpu"):
        try:
            if is_v2:
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                quota, period = (
                    (folder / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                )
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1") and int(period) > 0:
            yield int(quota) / int(period)


def _bytes_left_in_groups(root: Path) -> Iterator[int]:
    """Yield the bytes left in each limited control group of this process, from its own to the outermost."""
    for is_v2, folder in _groups(root, "memory"):
        controller = _V2 if is_v2 else _V1
        limit = _read_limit(folder / controller.limit)
        if limit is not None:
            yield limit - _read_usage(folder, controller)


def _groups(root: Path, controller: str) -> Iterator[tuple[bool, Path]]:
    """Yield the folders of this process's control groups that may limit what `controller` counts, from its own to the
    outermost, each with whether they are of the second version."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        is_v2 = controllers == ""
        if not is_v2 and controller not in controllers.split(","):
            continue
        mount = root / _CGROUP if is_v2 else root / _CGROUP / controller
        group = mount / path.strip("/")
        # In a container the path may be that of the host, which cannot be read; the mount itself is then the group.
        for folder in (group, *group.parents):
            if not folder.is_relative_to(mount):
                break
            yield is_v2, folder


def _read_limit(file: Path) -> int | None:
    """Return the group's limit in bytes, None without one: v2 then says "max", v1 a number beyond any memory."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _read_usage(folder: Path, controller: _MemoryController) -> int:
    stat = _read_fields(folder / "memory.stat")
    used = int((folder / controller.usage).read_text())
    return used - sum(stat.get(name, 0) for name in controller.reclaimable)


def _read_fields(file: Path) -> dict[str, int]:
    """Parse lines of a name, a number and, in meminfo, a unit."""
    return {name: int(value) for name, value, *_ in (line.split() for line in file.read_text().splitlines())}
