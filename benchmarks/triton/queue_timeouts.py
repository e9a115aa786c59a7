"""The lateness of rejections by queue timeout."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.triton.servers import V2Server, sluice

CLIENTS = 64
SECONDS = 4.0
LIMITS_MS = (100, 200, 500)
LONGEST_S = 120.0
LATEST = 0.1
"""Target for the lateness of a rejection, as a share of the limit."""
_SERVICE_MS = 10

_CODE = f"""\
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        time.sleep({_SERVICE_MS / 1e3})
        tensors = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("y", tensor)]) for tensor in tensors]
"""
_CONFIG = """\
name: "{name}"
backend: "python"
max_batch_size: 1
input [ {{ name: "x" data_type: TYPE_FP32 dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: [ -1 ] }} ]
dynamic_batching {{
  default_queue_policy {{ timeout_action: REJECT default_timeout_microseconds: {limit_us} }}
}}
"""


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure the lateness of rejections at the client, as shares of their limits.

    `CLIENTS` clients keep a model busy whose one instance serves few of them within the limit.
    """
    folder = out.resolve() / "triton"
    for limit_ms in LIMITS_MS:
        _write(folder / "timeouts", limit_ms)
    figures: list[Figure] = []
    with sluice(folder / "timeouts", folder / "sluice-timeouts.log") as server:
        for limit_ms in LIMITS_MS:
            report(f"limit of {limit_ms} ms")
            figures += _figures(limit_ms, [_late(server, limit_ms) for _ in range(repeats)])
    return figures


def _figures(limit_ms: int, repeats: Sequence[Sequence[float]]) -> list[Figure]:
    name = f"refusal after {limit_ms} ms, {CLIENTS} clients"
    columns = {"p50": 50.0, "p99": 99.0, "max": 100.0}
    return [
        Figure(
            name,
            f"late, {column}",
            "of the limit",
            tuple(float(np.percentile(late, percentile)) for late in repeats),
            Target(LATEST) if column == "p99" else None,
        )
        for column, percentile in columns.items()
    ]


def _late(server: V2Server, limit_ms: int) -> list[float]:
    """Return the lateness of each rejection. Raises BenchmarkError where there are too few, or one is too early."""
    command = (sys.executable, "-m", "benchmarks.triton.timeouts_client", str(server.http_port), _name(limit_ms))
    options = ("--clients", str(CLIENTS), "--seconds", str(SECONDS))
    done = subprocess.run((*command, *options), capture_output=True, text=True, timeout=LONGEST_S, check=False)
    if done.returncode:
        raise BenchmarkError(f"the clients failed: {done.stderr.strip()[-300:]}")
    limit_s = limit_ms / 1e3
    late = [(waited - limit_s) / limit_s for waited in json.loads(done.stdout)["rejected_s"]]
    if len(late) < CLIENTS or min(late) < 0:
        raise BenchmarkError(f"{len(late)} refusals, the earliest at {min(late, default=0):.0%} of its limit")
    return late


def _write(folder: Path, limit_ms: int) -> None:
    model = folder / _name(limit_ms)
    (model / "1").mkdir(parents=True, exist_ok=True)
    (model / "config.pbtxt").write_text(_CONFIG.format(name=model.name, limit_us=limit_ms * 1000))
    (model / "1" / "model.py").write_text(_CODE)


def _name(limit_ms: int) -> str:
    return f"limit_{limit_ms}_ms"
