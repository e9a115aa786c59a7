"""Runs wrk, a load generator, against one infer route."""

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from tempfile import NamedTemporaryFile

from benchmarks.figures import BenchmarkError
from benchmarks.triton.servers import V2Server

LONGEST_S = 600.0
_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3, "m": 6e4}


@dataclass(frozen=True, slots=True)
class WrkResult:
    """The result of one run: requests/s, and the 99th percentile of the latency."""

    rate: float
    p99_ms: float


def check_wrk() -> None:
    """Raises BenchmarkError where wrk is not installed."""
    if shutil.which("wrk") is None:
        raise BenchmarkError("the HTTP load needs wrk: apt-get install wrk")


def wrk(server: V2Server, model: str, request: Mapping[str, object], clients: int, seconds: float) -> WrkResult:
    """Run `clients` that send the same JSON request to `model` over and over.

    Raises BenchmarkError where a response is not 2xx.
    """
    url = f"http://127.0.0.1:{server.http_port}/v2/models/{model}/infer"
    with NamedTemporaryFile("w", suffix=".lua") as script:  # wrk reads it more than once
        script.write("wrk.method = 'POST'\nwrk.headers['content-type'] = 'application/json'\n")
        script.write(f"wrk.body = '{json.dumps(request)}'\n")
        script.flush()
        command = ("wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "-s", script.name, url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s|m)\b", done.stdout)
    if rate is None or p99 is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise BenchmarkError(f"wrk against {server.name}: {done.stdout.strip()[-400:]}{done.stderr.strip()[-200:]}")
    return WrkResult(float(rate[1]), float(p99[1]) * _MS[p99[2]])
