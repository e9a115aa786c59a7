"""vLLM's OpenAI server, started as `vllm serve` does, on request with a worker that computes nothing.

It runs in vLLM's own environment. vLLM starts its engine core as a new Python that imports this module again, so what
is replaced here is replaced there.
"""

import os
import sys
import time
from typing import Any

CORES = os.environ.get("BENCH_ENGINE_CORES")  # noqa: TID251 - vLLM reads no options of ours
"""The cores of an engine that computes nothing; None for vLLM as it is."""
TOKEN = 99
"""The token of every step: `~` in the bundled model's vocabulary."""


class Pace:
    """The pace of the steps: the seed of the latest request says how many tokens a second all get together."""

    tokens_per_second = 1.0
    due = 0.0

    def wait(self, num_tokens: int) -> None:
        """Wait until a step of so many tokens is due. A late step is not made up for."""
        now = time.perf_counter()
        time.sleep(max(self.due - now, 0.0))
        self.due = max(self.due, now) + num_tokens / self.tokens_per_second


_pace = Pace()


def _execute_nothing(worker: Any, scheduled: Any) -> Any:
    """Return one token for each request of a step, in place of the worker's own method."""
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

    request_ids = list(scheduled.num_scheduled_tokens)
    if not request_ids:
        return EMPTY_MODEL_RUNNER_OUTPUT
    for request in scheduled.scheduled_new_reqs:
        _pace.tokens_per_second = float(request.sampling_params.seed or 1)
    _pace.wait(len(request_ids))
    rows = {request_id: row for row, request_id in enumerate(request_ids)}
    return ModelRunnerOutput(request_ids, rows, [[TOKEN] for _ in request_ids])


def _replace_worker(cores: str) -> None:
    from vllm.v1.worker.gpu_worker import Worker

    Worker.execute_model = _execute_nothing
    if __name__ != "__main__":  # the engine core leaves the server its core
        os.sched_setaffinity(0, map(int, cores.split(",")))


if CORES is not None:
    _replace_worker(CORES)

if __name__ == "__main__":
    from vllm.entrypoints.launchers.api_server.entry import main

    sys.exit(main())
