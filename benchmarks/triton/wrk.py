"""wrk, the load generator, against one infer route."""

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
    """What one run has seen: requests/s, and the latency that 99 of 100 requests stay below."""

    rate: float
    p99_ms: float


def check_wrk() -> None:
    """Raises BenchmarkError where it is not installed."""
    if shutil.which("wrk") is None:
        raise BenchmarkError("the HTTP load needs wrk: apt-get install wrk")


def wrk(server: V2Server, model: str, request: Mapping[str, object], clients: int, seconds: float) -> WrkResult:
    """`clients` that ask `model` the same JSON request over and over.

    Raises BenchmarkError where any was not answered with a 2xx.
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
