"""`--http-workers`: requests a second with one gateway process and with two, over an engine that computes nothing."""

import json
import os
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.server import Server, cpu_s, running_server
from benchmarks.streaming.engine import CORES_VARIABLE
from benchmarks.triton.wrk import check_wrk, post_script, run_wrk
from sluice.gateway.checkpoint import find_checkpoint, model_name

NUM_CLIENTS = 64
NUM_TOKENS = 4
WARM_S, RUN_S, IDLE_S = 1.0, 6.0, 1.0
NUM_WORKERS = (1, 2)
RATIO_TARGET = Target(1.7, is_ceiling=False)


@dataclass(frozen=True, slots=True)
class Row:
    """A kind of request."""

    name: str
    path: str
    is_streamed: bool = False
    is_forwarded: bool = False

    def script(self) -> str:
        """Return wrk's script."""
        if self.is_forwarded:
            return "wrk.method = 'GET'\n"
        body = {"model": model_name(find_checkpoint(None)), "max_tokens": NUM_TOKENS, "seed": 10**6}
        if self.path.endswith("chat/completions"):
            body |= {"messages": [{"role": "user", "content": "Which way does water run?"}]}
        else:
            body |= {"prompt": "Which way does water run?"}
        return post_script(json.dumps({**body, "stream": self.is_streamed}))


ROWS = (
    Row("completions", "/v1/completions"),
    Row("chat", "/v1/chat/completions"),
    Row("chat, streamed", "/v1/chat/completions", is_streamed=True),
    Row("forwarded: GET /v1/models", "/v1/models", is_forwarded=True),
)


def measure(num_repeats: int, folder: Path, report: ReportProgress) -> list[Figure]:
    """Measure each kind of request with one process and with two, in turns."""
    check_wrk()
    samples: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for _ in range(num_repeats):
        for row in ROWS:
            rates = []
            for number in NUM_WORKERS:
                rate, spent_us, resident_mb = _measure(row, number, folder)
                rates.append(rate)
                case = f"{row.name}, {number} gateway process{'es' if number > 1 else ''}"
                report(f"{case}: {rate:,.0f} requests/s, {spent_us:.0f} us of CPU a request, {resident_mb:.0f} MB")
                samples["requests", case, "1/s"].append(rate)
                samples["gateway CPU", case, "us/request"].append(spent_us)
                samples["memory", case, "MB"].append(resident_mb)
            samples["two processes over one", row.name, "ratio"].append(rates[1] / rates[0])
    return [
        Figure(name, case, unit, tuple(values), RATIO_TARGET if unit == "ratio" else None)
        for (name, case, unit), values in samples.items()
    ]


def _measure(row: Row, num_workers: int, folder: Path) -> tuple[float, float, float]:
    """Return requests/s, microseconds of CPU a request, and MB of the gateway's processes."""
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    prefix = ("env", f"{CORES_VARIABLE}={cores}")
    module, option = "benchmarks.streaming.serve", f"--http-workers={num_workers}"
    with running_server(find_checkpoint(None), folder / "workers.log", option, module=module, prefix=prefix) as server:
        _wrk(server, row, WARM_S)
        time.sleep(IDLE_S)
        processes = _gateways(server)
        before = sum(cpu_s(each.pid) for each in processes)
        rate = _wrk(server, row, RUN_S)
        spent_s = sum(cpu_s(each.pid) for each in processes) - before
        memory_mb = sum(each.memory_full_info().pss for each in processes) / 1e6
    return rate, spent_s * 1e6 / (rate * RUN_S), memory_mb


def _gateways(server: Server) -> list[psutil.Process]:
    children = server.gateway.children()
    return [server.gateway, *(each for each in children if "sluice.gateway.workers.worker" in each.cmdline())]


def _wrk(server: Server, row: Row, seconds: float) -> float:
    return run_wrk(f"{server.url}{row.path}", row.script(), NUM_CLIENTS, seconds, "the gateway").rate
