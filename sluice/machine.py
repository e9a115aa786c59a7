"""How much memory this process may still take: the machine's, or less where its control group has a limit."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GPU = re.compile(r"nvidia\d+")
_DEVICES = Path("/dev")


def num_gpus(devices: Path = _DEVICES) -> int:
    """Return how many NVIDIA GPUs the driver shows as device files. A library may be able to use fewer of them."""
    return sum(1 for each in devices.glob("nvidia[0-9]*") if _GPU.fullmatch(each.name))


_KIB = 1024


@dataclass(frozen=True, slots=True)
class _Controller:
    """Where one generation of control groups tells of memory; files are named relative to a group's folder."""

    mount: str
    limit: str
    usage: str
    reclaimable: tuple[str, ...]
    """Fields of memory.stat: pages of files, which the kernel drops before it refuses memory."""


_V2 = _Controller("sys/fs/cgroup", "memory.max", "memory.current", ("active_file", "inactive_file"))
_V1 = _Controller(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory that can be taken without swapping or being killed; what caches files counts as available."""
    in_machine = _read_fields(root / "proc/meminfo")["MemAvailable:"] * _KIB
    return max(0, min([in_machine, *_left_in_groups(root)]))


def _left_in_groups(root: Path) -> Iterator[int]:
    """What each limited group around this process has left, from its own up to the outermost."""
    for line in (root / "proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _left(root, _V2, path)
        elif "memory" in controllers.split(","):
            yield from _left(root, _V1, path)


def _left(root: Path, controller: _Controller, path: str) -> Iterator[int]:
    mount = root / controller.mount
    group = mount / path.strip("/")
    # Within a container the path may be the host's, which is not there to be read; the mount itself is its group.
    for folder in (group, *group.parents):
        if not folder.is_relative_to(mount):
            return
        limit = _limit(folder / controller.limit)
        if limit is not None:
            yield limit - _used(folder, controller)


def _limit(file: Path) -> int | None:
    """None where the group has none: v2 has the word "max" then, v1 a number past any memory."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _used(folder: Path, controller: _Controller) -> int:
    stat = _read_fields(folder / "memory.stat")
    used = int((folder / controller.usage).read_text())
    return used - sum(stat.get(name, 0) for name in controller.reclaimable)


def _read_fields(file: Path) -> dict[str, int]:
    """Lines of a name and a number (and, in meminfo, a unit)."""
    return {name: int(value) for name, value, *_ in (line.split() for line in file.read_text().splitlines())}
