"""Memory, cores and GPUs, from files laid out like the kernel's."""

import os
from pathlib import Path

import pytest

from sluice.machine import available_bytes, num_cores, num_gpus

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write(
        tmp_path, {"proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n", "proc/self/cgroup": "0::/\n"}
    )
    return tmp_path


def v2(folder: str, limit: str, current: int, file_pages: int = 0) -> dict[str, str]:
    prefix = f"sys/fs/cgroup{folder}"
    stat = f"anon 5\nactive_file {file_pages // 2}\ninactive_file {file_pages - file_pages // 2}\n"
    return {f"{prefix}/memory.max": limit, f"{prefix}/memory.current": str(current), f"{prefix}/memory.stat": stat}


def v1(folder: str, limit: int, usage: int, file_pages: int) -> dict[str, str]:
    prefix = f"sys/fs/cgroup/memory{folder}"
    stat = f"cache 3\ntotal_active_file 0\ntotal_inactive_file {file_pages}\n"
    return {
        f"{prefix}/memory.limit_in_bytes": str(limit),
        f"{prefix}/memory.usage_in_bytes": str(usage),
        f"{prefix}/memory.stat": stat,
    }


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        pytest.param("0::/", {}, 16 * GIB, id="without limits it is the machine's"),
        pytest.param("0::/", v2("", str(4 * GIB), GIB), 3 * GIB, id="a container's limit wins"),
        pytest.param("0::/", v2("", str(64 * GIB), GIB), 16 * GIB, id="a limit above what the machine has does not"),
        pytest.param("0::/", v2("", str(4 * GIB), 3 * GIB, 2 * GIB), 3 * GIB, id="cached files count as available"),
        pytest.param("0::/", v2("", str(GIB), 2 * GIB), 0, id="a group over its limit leaves nothing"),
        pytest.param(
            "0::/a/b", v2("/a", str(2 * GIB), GIB) | v2("/a/b", "max", GIB), GIB, id="the tightest of nested groups"
        ),
        pytest.param(
            "9:cpu:/\n4:memory:/docker/x\n0::/",
            v1("/docker/x", 2 * GIB, GIB, GIB // 2),
            3 * GIB // 2,
            id="the first generation of groups",
        ),
    ],
)
def test_memory_that_is_available(root: Path, group: str, files: dict[str, str], expected: int) -> None:
    write(root, {"proc/self/cgroup": f"{group}\n", **files})
    assert available_bytes(root) == expected


def test_this_machine() -> None:
    assert 0 < available_bytes() < 1 << 50
    assert 0 < num_cores() <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {}, 8),
        ("0::/", {"cpu.max": "max 100000\n"}, 8),
        ("0::/", {"cpu.max": "400000 100000\n"}, 4),
        ("0::/", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/", {"cpu.max": "20000 100000\n"}, 1),
        ("0::/", {"cpu.max": "6400000 100000\n"}, 8),
        ("0::/a/b", {"a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n"}, 3),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "200000\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu,cpuacct:/x", {"cpu/x/cpu.cfs_quota_us": "-1\n", "cpu/x/cpu.cfs_period_us": "100000\n"}, 8),
    ],
)
def test_a_container_has_the_cores_of_its_limit(
    root: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    write(root, {"proc/self/cgroup": f"{group}\n"})
    write(root, {f"sys/fs/cgroup/{name}": text for name, text in files.items()})
    assert num_cores(root) == expected


@pytest.mark.parametrize(
    ("visible", "expected"),
    [(None, 3), ("", 0), ("1", 1), ("0, 2", 2), ("0,-1,1", 1), ("-1", 0), ("GPU-5ab,MIG-1", 2), ("0,1,2,3", 3)],
)
def test_cuda_hides_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, expected: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert num_gpus(tmp_path) == expected
