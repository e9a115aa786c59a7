"""Measures Sluice and tritonserver in turns, on the same models with the same clients."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.triton.repository import DENSE_WIDTH, WIDTH, write_onnx_models, write_python_models
from benchmarks.triton.servers import V2Server, sluice, tritonserver
from benchmarks.triton.wrk import LONGEST_S, check_wrk, wrk

CLIENTS = (1, 16, 64)
SECONDS = 3.0
NUM_STREAMS = 10_000
"""Number of streams of which none may be short or stalled."""


@dataclass(frozen=True, slots=True)
class LoadKind:
    """One kind of load, by wrk or `benchmarks.triton.client`. `target_ratio` is the least ratio to Triton's rate."""

    name: str
    client: str
    unit: str
    target_ratio: float


LOAD_KINDS = (
    LoadKind("HTTP infer", "wrk", "requests/s", 0.8),
    LoadKind("gRPC infer", "grpc", "requests/s", 1.0),
    LoadKind("gRPC stream", "grpc-stream", "requests/s", 1.5),
    LoadKind("generate_stream", "generate-stream", "events/s", 1.0),
)


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure both servers and their ratios. Raises BenchmarkError where one does not start or wrk is missing."""
    check_wrk()
    folder = out.resolve() / "triton"
    write_python_models(folder / "python")
    write_onnx_models(folder / "onnx")

    @contextmanager
    def servers() -> Iterator[tuple[V2Server, V2Server]]:
        with (
            tritonserver(folder / "python", out / "envs", folder / "tritonserver.log", report) as triton,
            sluice(folder / "python", folder / "sluice.log") as ours,
        ):
            yield ours, triton

    figures: list[Figure] = []
    for kind in LOAD_KINDS:
        figures += _compare(kind, servers, repeats, report)
    with servers() as both:
        figures += _count_faults(both[0], report)
        figures += [Figure("memory", server.name, "MB", (server.rss_mb(),)) for server in both]
    with sluice(folder / "onnx", folder / "sluice-onnx.log") as server:
        return figures + _batching(server, repeats, report)


Servers = Callable[[], AbstractContextManager[tuple[V2Server, V2Server]]]
Pair = tuple[float, float]
MAX_DEATHS = 5


def _compare(kind: LoadKind, servers: Servers, repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure one kind of load at each number of clients."""
    figures = []
    for clients in CLIENTS:
        name = f"{kind.name}, {clients} clients"
        pairs = _pairs(kind, servers, clients, repeats, report)
        report(f"{name}: " + ", ".join(f"{ours:,.0f} / {triton:,.0f}" for ours, triton in pairs))
        figures += [
            Figure(name, "sluice", kind.unit, tuple(ours for ours, _ in pairs)),
            Figure(name, "triton", kind.unit, tuple(triton for _, triton in pairs)),
            Figure(
                name,
                "sluice / triton",
                "ratio",
                tuple(ours / triton for ours, triton in pairs),
                Target(kind.target_ratio, is_ceiling=False) if clients > 1 else None,
            ),
        ]
    return figures


def _pairs(kind: LoadKind, servers: Servers, clients: int, repeats: int, report: ReportProgress) -> list[Pair]:
    """Measure pairs of rates in turns. tritonserver often dies as many gRPC streams end, and is then restarted."""
    pairs: list[Pair] = []
    num_deaths = 0
    while len(pairs) < repeats:
        with servers() as (ours, triton):
            try:
                while len(pairs) < repeats:
                    theirs = _rate(triton, kind.client, clients)
                    pairs.append((_rate(ours, kind.client, clients), theirs))
            except BenchmarkError as error:
                num_deaths += 1
                if triton.is_alive() or num_deaths > MAX_DEATHS:
                    raise
                report(f"tritonserver died; a new one is started ({error})"[:100])
    return pairs


def _rate(server: V2Server, kind: str, clients: int) -> float:
    if kind == "wrk":
        return _wrk(server, "identity", "INPUT0", WIDTH, clients)
    counts = _client(server, kind, clients, "--seconds", str(SECONDS))
    return float(counts["num_events"] / counts["seconds"])


def _client(server: V2Server, kind: str, clients: int, *more: str) -> dict[str, float]:
    port = server.http_port if kind == "generate-stream" else server.grpc_port
    command = (sys.executable, "-m", "benchmarks.triton.client", kind, str(port), "--clients", str(clients), *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"the {kind} client failed against {server.name}: {done.stderr.strip()[-300:]}")
    counts: dict[str, float] = json.loads(done.stdout)
    return counts


def _wrk(server: V2Server, model: str, tensor: str, width: int, clients: int) -> float:
    """Measure JSON infer requests per second."""
    values = [float(index) for index in range(width)]
    request = {"inputs": [{"name": tensor, "shape": [1, width], "datatype": "FP32", "data": values}]}
    return wrk(server, model, request, clients, SECONDS).rate


def _count_faults(ours: V2Server, report: ReportProgress) -> list[Figure]:
    """Count the short and stalled streams of many."""
    report(f"{NUM_STREAMS} streams, 64 at a time")
    counts = _client(ours, "generate-stream", 64, "--requests", str(NUM_STREAMS))
    faults = counts["num_short"] + counts["num_stalled"]
    return [Figure(f"short or stalled of {NUM_STREAMS}", "sluice", "streams", (float(faults),), Target(0))]


def _batching(server: V2Server, repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure a small ONNX network with dynamic batching and without."""
    figures = []
    for model in ("dense_batched", "dense_single"):
        for clients in CLIENTS[1:]:
            report(f"{model}, {clients} clients")
            rates = tuple(_wrk(server, model, "x", DENSE_WIDTH, clients) for _ in range(repeats))
            figures.append(Figure(f"ONNX HTTP infer, {clients} clients", model, "requests/s", rates))
    return figures
