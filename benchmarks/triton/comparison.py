"""Measures Sluice and tritonserver in turns, on the same models with the same clients."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.triton.repository import (
    DENSE_WIDTH,
    WIDTH,
    write_numpy_models,
    write_onnx_models,
    write_python_models,
)
from benchmarks.triton.servers import V2Server, sluice, tritonserver
from benchmarks.triton.wrk import LONGEST_S, check_wrk, wrk_binary, wrk_json

CLIENTS = (1, 16, 64)
SECONDS = 3.0
IDLE_S = 1.5
"""Pause before each measurement: what one server still does is not the other's burden."""
NUM_STREAMS = 10_000
"""Number of streams of which none may be short or stalled."""
_SAME = dict.fromkeys(CLIENTS[1:], 1.0)


@dataclass(frozen=True, slots=True)
class LoadKind:
    """A kind of load, by wrk or `benchmarks.triton.client`. `targets` are the least ratios to Triton's rate, by
    clients."""

    name: str
    client: str
    unit: str
    targets: Mapping[int, float]
    model: str = "identity"

    def row(self, clients: int) -> str:
        return f"{self.name}, {clients} clients"


_HTTP = {1: 0.8, 16: 0.9, 64: 0.9}
_ONNX = dict.fromkeys(CLIENTS, 1.0)
LOAD_KINDS = (
    LoadKind("HTTP JSON infer", "wrk-json", "requests/s", _HTTP),
    LoadKind("HTTP binary infer", "wrk-binary", "requests/s", _HTTP),
    LoadKind("HTTP JSON infer of ONNX", "wrk-json", "requests/s", _ONNX, "dense_single"),
    LoadKind("HTTP binary infer of ONNX", "wrk-binary", "requests/s", _ONNX, "dense_single"),
    LoadKind("HTTP JSON infer of batched ONNX", "wrk-json", "requests/s", _ONNX, "dense_batched"),
    LoadKind("gRPC infer", "grpc", "requests/s", _SAME),
    LoadKind("gRPC stream", "grpc-stream", "requests/s", dict.fromkeys(CLIENTS[1:], 1.5)),
    LoadKind("generate_stream", "generate-stream", "events/s", _SAME),
)


def measure(repeats: int, out: Path, only: str, report: ReportProgress) -> list[Figure]:
    """Measure both servers and their ratios, in the rows whose name has `only` in it.

    Raises BenchmarkError where one does not start, wrk is missing or no row is left.
    """
    check_wrk()
    rows = [(kind, clients) for kind in LOAD_KINDS for clients in CLIENTS if only in kind.row(clients)]
    if not rows:
        raise BenchmarkError(f"no row of this benchmark has {only!r} in its name")
    folder = out.resolve() / "triton"
    for server, write_dense in (("sluice", write_onnx_models), ("tritonserver", write_numpy_models)):
        write_python_models(folder / server)
        write_dense(folder / server)

    @contextmanager
    def servers() -> Iterator[tuple[V2Server, V2Server]]:
        with (
            tritonserver(folder / "tritonserver", out / "envs", folder / "tritonserver.log", report) as triton,
            sluice(folder / "sluice", folder / "sluice.log") as ours,
        ):
            yield ours, triton

    figures: list[Figure] = []
    for kind, clients in rows:
        figures += _compare(kind, servers, clients, repeats, report)
    if only:
        return figures
    with servers() as both:
        figures += _count_faults(both[0], report)
        return figures + [Figure("memory", server.name, "MB", (server.rss_mb(),)) for server in both]


Servers = Callable[[], AbstractContextManager[tuple[V2Server, V2Server]]]
Pair = tuple[float, float]
MAX_DEATHS = 5


def _compare(kind: LoadKind, servers: Servers, clients: int, repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure one kind of load at a number of clients."""
    name = kind.row(clients)
    pairs = _pairs(kind, servers, clients, repeats, report)
    report(f"{name}: " + ", ".join(f"{ours:,.0f} / {triton:,.0f}" for ours, triton in pairs))
    target = Target(kind.targets[clients], is_ceiling=False) if clients in kind.targets else None
    return [
        Figure(name, "sluice", kind.unit, tuple(ours for ours, _ in pairs)),
        Figure(name, "triton", kind.unit, tuple(triton for _, triton in pairs)),
        Figure(name, "sluice / triton", "ratio", tuple(ours / triton for ours, triton in pairs), target),
    ]


def _pairs(kind: LoadKind, servers: Servers, clients: int, repeats: int, report: ReportProgress) -> list[Pair]:
    """Measure pairs of rates in turns; each pair begins with the other server than the one before.

    tritonserver often dies as many gRPC streams end, and is then restarted.
    """
    pairs: list[Pair] = []
    num_deaths = 0
    while len(pairs) < repeats:
        with servers() as (ours, triton):
            try:
                while len(pairs) < repeats:
                    order = (ours, triton) if len(pairs) % 2 else (triton, ours)
                    rates = {server.name: _rate(server, kind, clients) for server in order}
                    pairs.append((rates[ours.name], rates[triton.name]))
            except BenchmarkError as error:
                num_deaths += 1
                if triton.is_alive() or num_deaths > MAX_DEATHS:
                    raise
                report(f"tritonserver died; a new one is started ({error})"[:100])
    return pairs


def _rate(server: V2Server, kind: LoadKind, clients: int) -> float:
    time.sleep(IDLE_S)
    if kind.client.startswith("wrk"):
        name, width = ("INPUT0", WIDTH) if kind.model == "identity" else ("x", DENSE_WIDTH)
        send = wrk_binary if kind.client == "wrk-binary" else wrk_json
        return send(server, kind.model, name, width, clients, SECONDS).rate
    counts = _client(server, kind.client, clients, "--seconds", str(SECONDS))
    return float(counts["num_events"] / counts["seconds"])


def _client(server: V2Server, kind: str, clients: int, *more: str) -> dict[str, float]:
    port = server.http_port if kind == "generate-stream" else server.grpc_port
    command = (sys.executable, "-m", "benchmarks.triton.client", kind, str(port), "--clients", str(clients), *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"the {kind} client failed against {server.name}: {done.stderr.strip()[-300:]}")
    counts: dict[str, float] = json.loads(done.stdout)
    return counts


def _count_faults(ours: V2Server, report: ReportProgress) -> list[Figure]:
    """Count the short and stalled streams of many."""
    report(f"{NUM_STREAMS} streams, 64 at a time")
    counts = _client(ours, "generate-stream", 64, "--requests", str(NUM_STREAMS))
    faults = counts["num_short"] + counts["num_stalled"]
    return [Figure(f"short or stalled of {NUM_STREAMS}", "sluice", "streams", (float(faults),), Target(0))]
