"""Sluice and tritonserver in turns, on the same models with the same clients."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.offline.environments import Say
from benchmarks.triton.repository import DENSE_WIDTH, WIDTH, write_onnx_models, write_python_models
from benchmarks.triton.servers import V2Server, sluice, tritonserver
from benchmarks.triton.wrk import LONGEST_S, check_wrk, wrk

CLIENTS = (1, 16, 64)
SECONDS = 3.0
NUM_WATCHED = 10_000
"""Streams of which none may be short or stalled."""


@dataclass(frozen=True, slots=True)
class Way:
    """One way to load a server. `reach` is the least ratio to Triton that is asked, at 16 and 64 clients."""

    name: str
    kind: str
    unit: str
    reach: float


WAYS = (
    Way("HTTP infer", "wrk", "requests/s", 0.8),
    Way("gRPC infer", "grpc", "requests/s", 1.0),
    Way("gRPC stream", "grpc-stream", "requests/s", 1.5),
    Way("generate_stream", "generate-stream", "events/s", 1.0),
)


def measure(repeats: int, out: Path, say: Say) -> list[Figure]:
    """Figures of both servers, and their ratios. Raises BenchmarkError where one does not start or wrk is missing."""
    check_wrk()
    folder = out.resolve() / "triton"
    write_python_models(folder / "python")
    write_onnx_models(folder / "onnx")

    @contextmanager
    def servers() -> Iterator[tuple[V2Server, V2Server]]:
        with (
            tritonserver(folder / "python", out / "envs", folder / "tritonserver.log", say) as triton,
            sluice(folder / "python", folder / "sluice.log") as ours,
        ):
            yield ours, triton

    figures: list[Figure] = []
    for way in WAYS:
        figures += _compared(way, servers, repeats, say)
    with servers() as both:
        figures += _watched(both[0], say)
        figures += [Figure("memory", server.name, "MB", (server.rss_mb(),)) for server in both]
    with sluice(folder / "onnx", folder / "sluice-onnx.log") as server:
        return figures + _batching(server, repeats, say)


Servers = Callable[[], AbstractContextManager[tuple[V2Server, V2Server]]]
Pair = tuple[float, float]
MOST_DEATHS = 5


def _compared(way: Way, servers: Servers, repeats: int, say: Say) -> list[Figure]:
    """One way of asking, with as many clients as there are sorts of crowds."""
    figures = []
    for clients in CLIENTS:
        name = f"{way.name}, {clients} clients"
        pairs = _pairs(way, servers, clients, repeats, say)
        say(f"{name}: " + ", ".join(f"{ours:,.0f} / {triton:,.0f}" for ours, triton in pairs))
        figures += [
            Figure(name, "sluice", way.unit, tuple(ours for ours, _ in pairs)),
            Figure(name, "triton", way.unit, tuple(triton for _, triton in pairs)),
            Figure(
                name,
                "sluice / triton",
                "ratio",
                tuple(ours / triton for ours, triton in pairs),
                Target(way.reach, is_ceiling=False) if clients > 1 else None,
            ),
        ]
    return figures


def _pairs(way: Way, servers: Servers, clients: int, repeats: int, say: Say) -> list[Pair]:
    """Our rate and Triton's, in turns. tritonserver often dies when many gRPC streams end: then on fresh servers."""
    pairs: list[Pair] = []
    num_deaths = 0
    while len(pairs) < repeats:
        with servers() as (ours, triton):
            try:
                while len(pairs) < repeats:
                    theirs = _rate(triton, way.kind, clients)
                    pairs.append((_rate(ours, way.kind, clients), theirs))
            except BenchmarkError as error:
                num_deaths += 1
                if triton.is_alive() or num_deaths > MOST_DEATHS:
                    raise
                say(f"tritonserver died; on with another one ({error})"[:100])
    return pairs


def _rate(server: V2Server, kind: str, clients: int) -> float:
    if kind == "wrk":
        return _wrk(server, "identity", "INPUT0", WIDTH, clients)
    tally = _client(server, kind, clients, "--seconds", str(SECONDS))
    return float(tally["num_events"] / tally["seconds"])


def _client(server: V2Server, kind: str, clients: int, *more: str) -> dict[str, float]:
    port = server.http_port if kind == "generate-stream" else server.grpc_port
    command = (sys.executable, "-m", "benchmarks.triton.client", kind, str(port), "--clients", str(clients), *more)
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"the {kind} client failed against {server.name}: {done.stderr.strip()[-300:]}")
    tally: dict[str, float] = json.loads(done.stdout)
    return tally


def _wrk(server: V2Server, model: str, tensor: str, width: int, clients: int) -> float:
    """JSON infer requests/s."""
    values = [float(index) for index in range(width)]
    request = {"inputs": [{"name": tensor, "shape": [1, width], "datatype": "FP32", "data": values}]}
    return wrk(server, model, request, clients, SECONDS).rate


def _watched(ours: V2Server, say: Say) -> list[Figure]:
    """Whether every one of many streams is whole."""
    say(f"{NUM_WATCHED} streams, 64 at a time")
    tally = _client(ours, "generate-stream", 64, "--requests", str(NUM_WATCHED))
    faults = tally["num_short"] + tally["num_stalled"]
    return [Figure(f"short or stalled of {NUM_WATCHED}", "sluice", "streams", (float(faults),), Target(0))]


def _batching(server: V2Server, repeats: int, say: Say) -> list[Figure]:
    """A small ONNX network with dynamic batching and without."""
    figures = []
    for model in ("dense_batched", "dense_single"):
        for clients in CLIENTS[1:]:
            say(f"{model}, {clients} clients")
            rates = tuple(_wrk(server, model, "x", DENSE_WIDTH, clients) for _ in range(repeats))
            figures.append(Figure(f"ONNX HTTP infer, {clients} clients", model, "requests/s", rates))
    return figures
