"""Starts a worker process, sends it jobs, and measures its memory."""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.figures import BenchmarkError
from benchmarks.offline.protocol import Request, WorkerOptions

READY_LIMIT_S = 900.0
JOB_LIMIT_S = 900.0
EXIT_WAIT_S = 20.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The command of an engine's worker: interpreter, module, environment variables and options."""

    engine: str
    python: Path
    module: str
    options: WorkerOptions
    variables: tuple[str, ...] = ()

    def command(self) -> list[str]:
        options = self.options
        module = ("-m", self.module)
        arguments = (options.model, str(options.kv_cache_gib), str(options.num_threads))
        return ["env", *self.variables, str(self.python), *module, *arguments]


class Worker:
    """A worker that has loaded its engine and generated a token. `launch_s` is the time from its start until then."""

    def __init__(self, launch: Launch, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.engine = launch.engine
        self._process = process
        self._log = log
        started = time.perf_counter()
        self.version: str = self._read_line(READY_LIMIT_S)["version"]
        self.launch_s = time.perf_counter() - started

    def batch(self, requests: list[Request]) -> float:
        """Run all `requests` at once. Returns output tokens per second."""
        answer = self._run_job("batch", requests)
        self._check(answer["num_tokens"], requests)
        return float(answer["num_tokens"] / answer["seconds"])

    def single(self, request: Request) -> list[float]:
        """Run one request. Returns the seconds from its submission to each token."""
        times: list[float] = self._run_job("single", [request])["token_times_s"]
        self._check(len(times), [request])
        return times

    def rss_mb(self) -> float:
        """Return the memory of all its processes in MB of 10^6 bytes. Shared pages count in each."""
        process = psutil.Process(self._process.pid)
        tree = [process, *process.children(recursive=True)]
        return float(sum(one.memory_info().rss for one in tree) / 1e6)

    def _check(self, num_tokens: int, requests: list[Request]) -> None:
        if num_tokens != (wanted := sum(length for _, length in requests)):
            raise BenchmarkError(f"{self.engine} generated {num_tokens} tokens, asked for {wanted}")

    def _run_job(self, kind: str, requests: list[Request]) -> dict[str, Any]:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # reported below, as the answer does not come
            self._process.stdin.write(json.dumps({"kind": kind, "requests": requests}).encode() + b"\n")
            self._process.stdin.flush()
        return self._read_line(JOB_LIMIT_S)

    def _read_line(self, limit_s: float) -> dict[str, Any]:
        """Read the next line. A worker writes one for each job, and one when it is ready."""
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], limit_s)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            problem = "ended" if ready else f"said nothing for {limit_s:g} s"
            raise BenchmarkError(f"{self.engine} {problem}; see {self._log}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def running_worker(launch: Launch, log: Path) -> Iterator[Worker]:
    """Start a worker, yield it once it has generated a token, and end it with all its children."""
    log.parent.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).parents[2]
    with log.open("wb") as stderr:
        process = subprocess.Popen(
            launch.command(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, cwd=root,
            start_new_session=True,
        )  # fmt: skip
    try:
        yield Worker(launch, process, log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None and process.stdout is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    process.stdout.close()
    try:
        process.wait(EXIT_WAIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # children that outlived the worker
