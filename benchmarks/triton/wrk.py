"""Runs wrk, a load generator, against one infer route."""

import json
import re
import shutil
import subprocess
from array import array
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
    return run_wrk(_infer_url(server, model), post_script(json.dumps(request)), clients, seconds, server.name)


def _infer_url(server: V2Server, model: str) -> str:
    return f"http://127.0.0.1:{server.http_port}/v2/models/{model}/infer"


def wrk_json(server: V2Server, model: str, tensor: str, width: int, clients: int, seconds: float) -> WrkResult:
    """Send the numbers up to `width` as JSON, in FP32, in one row. Raises like `wrk`."""
    values = [float(index) for index in range(width)]
    request = {"inputs": [{"name": tensor, "shape": [1, width], "datatype": "FP32", "data": values}]}
    return wrk(server, model, request, clients, seconds)


def wrk_binary(server: V2Server, model: str, tensor: str, width: int, clients: int, seconds: float) -> WrkResult:
    """Send the same as bytes, and ask for bytes. Raises like `wrk`."""
    raw = array("f", range(width)).tobytes()
    size = {"binary_data_size": len(raw)}
    inputs = [{"name": tensor, "shape": [1, width], "datatype": "FP32", "parameters": size}]
    head = json.dumps({"inputs": inputs, "parameters": {"binary_data_output": True}})
    escaped = "".join(f"\\{byte:03d}" for byte in raw)
    script = (
        "wrk.method = 'POST'\nwrk.headers['content-type'] = 'application/octet-stream'\n"
        f"wrk.headers['inference-header-content-length'] = '{len(head)}'\nwrk.body = '{head}{escaped}'\n"
    )
    return run_wrk(_infer_url(server, model), script, clients, seconds, server.name)


def post_script(body: str) -> str:
    """Return wrk's script for a POST of JSON."""
    head = "wrk.method = 'POST'\nwrk.headers['content-type'] = 'application/json'\n"
    return f"{head}wrk.body = '{body}'\n"


def run_wrk(url: str, script: str, clients: int, seconds: float, name: str) -> WrkResult:
    """Run `clients` that send what `script` says over and over, to the server of that name.

    Raises BenchmarkError where a response is not 2xx.
    """
    with NamedTemporaryFile("w", suffix=".lua") as file:  # wrk reads it more than once
        file.write(script)
        file.flush()
        command = ("wrk", "-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "-s", file.name, url)
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", done.stdout)
    p99 = re.search(r"99%\s+([\d.]+)(us|ms|s|m)\b", done.stdout)
    if rate is None or p99 is None or "Non-2xx" in done.stdout or "Socket errors" in done.stdout:
        raise BenchmarkError(f"wrk against {name}: {done.stdout.strip()[-400:]}{done.stderr.strip()[-200:]}")
    return WrkResult(float(rate[1]), float(p99[1]) * _MS[p99[2]])
