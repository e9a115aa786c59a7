"""A process that answers questions, a line each: Triton reads at its import whether it interprets kernels or compiles
them, so that no process does both."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.paths import ROOT

Answer = dict[str, Any]


class Worker:
    """Asks such a process. An answer is kept: a question is asked once."""

    def __init__(self, process: "subprocess.Popen[str]", log: Path) -> None:
        self._process = process
        self._log = log
        self._answers: dict[str, Answer] = {}

    def ask(self, question: str) -> Answer:
        if question not in self._answers:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(f"{question}\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            assert line, f"the process ended: {self._log.read_text()[-2000:]}"
            self._answers[question] = json.loads(line)
        return self._answers[question]


@contextmanager
def running(module: str, log: Path, **environment: str) -> Iterator[Worker]:
    """Run `module`, which calls `serve`, until the end of the context."""
    everything = {**os.environ, **environment}  # noqa: TID251 - for the process
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
            cwd=ROOT, env=everything,
        ) as process,
    ):  # fmt: skip
        yield Worker(process, log)
        assert process.stdin is not None
        process.stdin.close()


def serve(answer: Callable[[str], Answer]) -> None:
    """Answer each line of the standard input by a line."""
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(answer(line.rstrip()))}\n")
        sys.stdout.flush()
