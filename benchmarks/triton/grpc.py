"""Measures gRPC beside tritonserver with h2load, in turns whose order changes, with a pause before each."""

import re
import shutil
import statistics
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tritonclient.grpc import service_pb2

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.triton.repository import WIDTH, write_large_model, write_python_models
from benchmarks.triton.servers import V2Server, sluice, tritonserver

SECONDS = 3
PAUSE_S = 2.0
STREAM_MESSAGES = 100
"""Requests that each call of ModelStreamInfer sends at once."""
LARGE_WIDTH = 2_500_000
"""Elements of a tensor of 10 MB."""
_SERVICE = "/inference.GRPCInferenceService/"


@dataclass(frozen=True, slots=True)
class GrpcLoad:
    """Calls of `method` whose body is `num_requests` requests to `model`, by each number of `clients`."""

    name: str
    method: str
    model: str
    width: int
    num_requests: int
    clients: tuple[int, ...]
    target_ratio: float


LOADS = (
    GrpcLoad("gRPC infer", "ModelInfer", "identity", WIDTH, 1, (1, 16, 64), 1.0),
    GrpcLoad("gRPC stream", "ModelStreamInfer", "identity", WIDTH, STREAM_MESSAGES, (1, 16, 64), 1.3),
    GrpcLoad("gRPC infer, 10 MB", "ModelInfer", "large", LARGE_WIDTH, 1, (1, 4), 1.0),
)


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure Sluice, its server of the grpc package, and tritonserver. Raises BenchmarkError without h2load."""
    if shutil.which("h2load") is None:
        raise BenchmarkError("the gRPC load needs h2load: apt-get install nghttp2-client")
    folder = out.resolve() / "triton-grpc"
    write_python_models(folder / "models")
    write_large_model(folder / "models")
    figures: list[Figure] = []
    for load in LOADS:
        body = folder / f"{load.model}-{load.num_requests}.bin"
        body.write_bytes(_message(load) * load.num_requests)
        for clients in load.clients:
            with _servers(folder, out, report) as servers:
                figures += _compare(load, body, clients, servers, repeats, report)
    return figures


@contextmanager
def _servers(folder: Path, out: Path, report: ReportProgress) -> Iterator[list[V2Server]]:
    """Run the three servers, anew for each row: tritonserver often dies as many streams end."""
    with ExitStack() as stack:
        models = folder / "models"
        yield [
            stack.enter_context(sluice(models, folder / "sluice.log")),
            stack.enter_context(sluice(models, folder / "grpcio.log", "--grpc-server", "grpcio", name="grpcio")),
            stack.enter_context(tritonserver(models, out / "envs", folder / "tritonserver.log", report)),
        ]


def _compare(
    load: GrpcLoad, body: Path, clients: int, servers: list[V2Server], repeats: int, report: ReportProgress
) -> list[Figure]:
    name = f"{load.name}, {clients} clients"
    rates: dict[str, list[float]] = {each.name: [] for each in servers}
    costs: dict[str, list[float]] = {each.name: [] for each in servers}
    for server in servers:
        _run(server, load, body, clients, 1)
    for repeat in range(repeats):
        for server in servers[repeat % len(servers) :] + servers[: repeat % len(servers)]:
            time.sleep(PAUSE_S)
            rate, cost = _run(server, load, body, clients, SECONDS)
            rates[server.name].append(rate)
            costs[server.name].append(cost)
    medians = {subject: statistics.median(values) for subject, values in rates.items()}
    report(f"{name}: " + ", ".join(f"{subject} {rate:,.0f}/s" for subject, rate in medians.items()))
    ratios = tuple(ours / theirs for ours, theirs in zip(rates["sluice"], rates["triton"], strict=True))
    target = Target(load.target_ratio, is_ceiling=False) if clients > 1 else None
    return [
        *(Figure(name, subject, "requests/s", tuple(values)) for subject, values in rates.items()),
        Figure(name, "sluice / triton", "ratio", ratios, target),
        *(Figure(f"{name}, CPU", subject, "us/request", tuple(values)) for subject, values in costs.items()),
    ]


def _run(server: V2Server, load: GrpcLoad, body: Path, clients: int, seconds: int) -> tuple[float, float]:
    """Return requests/s, and the CPU time of the server's own process for each, in µs."""
    before = server.cpu_s()
    command = ["h2load", "-t1", f"-c{clients}", "-m1", f"-D{seconds}", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    url = f"http://127.0.0.1:{server.grpc_port}{_SERVICE}{load.method}"
    done = subprocess.run([*command, url], capture_output=True, text=True, timeout=120, check=False)
    counts = re.search(r"requests: .* (\d+) succeeded, (\d+) failed", done.stdout)
    received = re.search(r"\((\d+)\) data", done.stdout)
    if counts is None or received is None or int(counts[2]) or not int(counts[1]):
        raise BenchmarkError(f"h2load against {server.name}: {done.stdout.strip()[-400:]}{done.stderr.strip()[-200:]}")
    num_requests = int(counts[1]) * load.num_requests
    if int(received[1]) < num_requests * load.width * 4:
        raise BenchmarkError(f"{server.name} sent {received[1]} bytes for {num_requests} requests: they failed")
    return num_requests / seconds, (server.cpu_s() - before) / num_requests * 1e6


def _message(load: GrpcLoad) -> bytes:
    """Return a request as gRPC sends it."""
    request = service_pb2.ModelInferRequest(model_name=load.model)
    tensor = request.inputs.add(name="INPUT0", datatype="FP32")
    tensor.shape.extend([1, load.width])
    request.raw_input_contents.append(np.arange(load.width, dtype=np.float32).tobytes())
    raw: bytes = request.SerializeToString()
    return b"\0" + len(raw).to_bytes(4, "big") + raw
