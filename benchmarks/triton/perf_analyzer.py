"""NVIDIA's perf_analyzer against Sluice: whether it accepts Sluice as Triton, and the rates it measures."""

import os
import re
import subprocess
import sysconfig
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, ReportProgress
from benchmarks.offline.environments import Environment, interpreter
from benchmarks.triton.repository import write_python_models
from benchmarks.triton.servers import TRITON, V2Server, sluice

CLIENT = Environment("triton-client", "tritonclient", "2.43.0")
"""The last version whose wheel has a perf_analyzer that needs few libraries."""
_LIBRARIES = ("libb64.so.0d", "libcudart.so.12")
"""Libraries that the program needs. The wheel of nvidia-pytriton has them under names with a hash."""

CONCURRENCY = 16
PROTOCOL_FLAGS: dict[str, tuple[str, ...]] = {
    "HTTP": ("-i", "http"),
    "HTTP, shared memory": ("-i", "http", "--shared-memory", "system"),
    "gRPC": ("-i", "grpc"),
    "gRPC stream": ("-i", "grpc", "--streaming"),
    "gRPC, shared memory": ("-i", "grpc", "--shared-memory", "system"),
}
LONGEST_S = 120.0


def measure(out: Path, report: ReportProgress) -> list[Figure]:
    """Measure inferences/s in every protocol. Raises BenchmarkError where perf_analyzer reports an error."""
    folder = out.resolve() / "triton"
    write_python_models(folder / "python")
    program, environment = _install(out / "envs", folder, report)
    with sluice(folder / "python", folder / "sluice.log") as server:
        return [_run(name, flags, program, environment, server, report) for name, flags in PROTOCOL_FLAGS.items()]


def _install(environments: Path, folder: Path, report: ReportProgress) -> tuple[Path, dict[str, str]]:
    """Install the program. Returns it and the environment in which it finds its libraries."""
    program = interpreter(CLIENT, environments, report).with_name("perf_analyzer")
    program.chmod(0o755)
    triton = interpreter(TRITON, environments, report)
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
    name: str,
    flags: tuple[str, ...],
    program: Path,
    environment: dict[str, str],
    server: V2Server,
    report: ReportProgress,
) -> Figure:
    report(f"perf_analyzer, {name}")
    port = server.grpc_port if "grpc" in flags else server.http_port
    # Three windows are taken as they are: on a busy machine it would search for a stable one for ever.
    limits = ("--concurrency-range", str(CONCURRENCY), "-p", "2000", "-s", "999", "--max-trials", "3")
    command = (str(program), "-m", "identity", "-u", f"127.0.0.1:{port}", *flags, *limits)
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LONGEST_S, check=False)
    rate = re.search(r"throughput: ([\d.]+) infer/sec", done.stdout)
    if done.returncode or rate is None:
        raise BenchmarkError(f"perf_analyzer, {name}: {done.stdout.strip()[-300:]} {done.stderr.strip()[-300:]}")
    return Figure(f"perf_analyzer, {name}", "sluice", "infer/s", (float(rate[1]),))
