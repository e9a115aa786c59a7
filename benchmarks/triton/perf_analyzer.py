"""NVIDIA's own load generator against Sluice: whether it takes us for Triton, and what it measures."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure
from benchmarks.offline.environments import Environment, Say, interpreter
from benchmarks.triton.repository import write_python_models
from benchmarks.triton.servers import TRITON, V2Server, sluice

CLIENT = Environment("triton-client", "tritonclient", "2.43.0")
"""The last one whose wheel has a perf_analyzer of few libraries."""
_LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
"""What the program needs and the wheel of nvidia-pytriton has, under names with a hash in them."""

CONCURRENCY = 16
WAYS: dict[str, tuple[str, ...]] = {
    "HTTP": ("-i", "http"),
    "HTTP, shared memory": ("-i", "http", "--shared-memory", "system"),
    "gRPC": ("-i", "grpc"),
    "gRPC stream": ("-i", "grpc", "--streaming"),
    "gRPC, shared memory": ("-i", "grpc", "--shared-memory", "system"),
}
LONGEST_S = 120.0


def measure(out: Path, say: Say) -> list[Figure]:
    """Its inferences/s in every way it can ask. Raises BenchmarkError where it is not content with an answer."""
    folder = out.resolve() / "triton"
    write_python_models(folder / "python")
    program, environment = _install(out / "envs", folder, say)
    with sluice(folder / "python", folder / "sluice.log") as server:
        return [_run(name, way, program, environment, server, say) for name, way in WAYS.items()]


def _install(environments: Path, folder: Path, say: Say) -> tuple[Path, dict[str, str]]:
    """The program, and the environment in which it finds its libraries."""
    program = interpreter(CLIENT, environments, say).with_name("perf_analyzer")
    program.chmod(0o755)
    triton = interpreter(TRITON, environments, say)
    site = Path(sysconfig.get_path("platlib", vars={"platbase": str(triton.parents[1])}))
    theirs, links = site / "nvidia_pytriton.libs", folder / "lib"
    links.mkdir(parents=True, exist_ok=True)
    for name in _LIBRARIES:
        (found,) = theirs.glob(f"{name.partition('.')[0]}-*")
        (links / name).unlink(missing_ok=True)
        (links / name).symlink_to(found)
    inherited = dict(os.environ)  # noqa: TID251 - it is the child's environment, not our configuration
    return program, {**inherited, "LD_LIBRARY_PATH": f"{links}:{theirs}"}


def _run(
    name: str, way: tuple[str, ...], program: Path, environment: dict[str, str], server: V2Server, say: Say
) -> Figure:
    say(f"perf_analyzer, {name}")
    port = server.grpc_port if "grpc" in way else server.http_port
    # One window of each length is taken as it is: on a busy machine it would try for ever to find a stable one.
    limits = ("--concurrency-range", str(CONCURRENCY), "-p", "2000", "-s", "999", "--max-trials", "3")
    command = (str(program), "-m", "identity", "-u", f"127.0.0.1:{port}", *way, *limits)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONGEST_S, check=False)
    rate = re.search(r"throughput: ([\d.]+) infer/sec", done.stdout)
    if done.returncode or rate is None:
        raise BenchmarkError(f"perf_analyzer, {name}: {done.stdout.strip()[-300:]} {done.stderr.strip()[-300:]}")
    return Figure(f"perf_analyzer, {name}", "sluice", "infer/s", (float(rate[1]),))
