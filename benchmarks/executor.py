"""The time of an executor's step without its runner, over the engine process's real transport."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import zmq

from benchmarks.figures import BenchmarkError, Figure, Target
from sluice.engine.config import EngineConfig
from sluice.engine.frames import Submit
from sluice.engine.loop.executor import InflightExecutor
from sluice.engine.process.bootstrap import collect_rarely
from sluice.engine.process.transport import Transport
from sluice.engine.runners.base import Runner, RunnerInfo, StepBatch
from sluice.engine.sampling.cores import Cores
from sluice.engine.sampling.host_logits import HostLogits
from sluice.engine.types import GenerateRequest, SamplingParams

NUM_STEPS = 200
PROMPT_TOKENS = 128
VOCABULARY = 8192
RUNNING = (1, 16, 64)
CROWD = 1000
"""Measured with greedy decoding alone."""
TARGETS = {(64, "greedy"): Target(0.25), (CROWD, "greedy"): Target(1.5)}
SAMPLINGS = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"temperature": 0.8, "top_p": 0.9},
}


class NullRunner(Runner):
    """A runner that returns the same random logits for every batch at once."""

    def __init__(self, num_rows: int = max(RUNNING), num_blocks: int = 4096) -> None:
        self.info = RunnerInfo(
            runtime="null",
            model_type="null",
            dtype="f32",
            vocab_size=VOCABULARY,
            eos_token_ids=(),
            max_model_len=2048,
            block_size=32,
            num_blocks=num_blocks,
        )
        self._logits = np.random.default_rng(0).normal(0.0, 3.0, (num_rows, VOCABULARY)).astype(np.float32)
        self._cores = Cores()

    def run(self, batch: StepBatch) -> HostLogits:
        return HostLogits(self._logits[: len(batch.sampled_rows)], self._cores)

    def close(self) -> None:
        self._cores.close()


def measure(num_repeats: int, num_steps: int = NUM_STEPS) -> list[Figure]:
    """Measure one figure for each number of running sequences and way of sampling."""
    collect_rarely()  # as in the engine process
    return [
        Figure(
            f"executor step, {num_running} running",
            sampling,
            "ms",
            tuple(_step_ms(num_running, SAMPLINGS[sampling], num_steps) for _ in range(num_repeats)),
            TARGETS.get((num_running, sampling)),
        )
        for sampling, num_running in [*product(SAMPLINGS, RUNNING), ("greedy", CROWD)]
    ]


def _step_ms(num_running: int, sampling: dict[str, float], num_steps: int) -> float:
    """Return the mean milliseconds of a decode step with `num_running` sequences, without the runner's time."""
    with connected_transport() as (transport, client):
        _submit(client, num_running, sampling, num_steps)
        return _time_steps(transport, num_running, num_steps)


@contextmanager
def connected_transport() -> "Iterator[tuple[Transport, zmq.Socket[bytes]]]":
    """Yield the engine's transport and a client that never reads, so that a frame costs its encoding and sending."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{Path(folder) / 'engine'}"
        transport, context = Transport(endpoint), zmq.Context()
        client = context.socket(zmq.DEALER)
        client.set_hwm(0)
        client.linger = 0
        client.connect(endpoint)
        try:
            client.send(b"")
            transport.await_launcher()
            yield transport, client
        finally:
            client.close()
            context.term()
            transport.close()


def _time_steps(transport: Transport, num_running: int, num_steps: int) -> float:
    most = max(num_running, 64)
    config = EngineConfig(model_path="", max_num_seqs=most, max_num_batched_tokens=8 * most)
    runner = NullRunner(most, num_blocks=32 * most)
    executor = InflightExecutor(runner, config, transport.receive, transport.emit)
    while executor.stats().prompt_tokens_total < num_running * PROMPT_TOKENS:
        executor.step()
    before, started = executor.stats(), time.perf_counter()
    for _ in range(num_steps):
        executor.step()
    elapsed_s, after = time.perf_counter() - started, executor.stats()
    if after.generation_tokens_total - before.generation_tokens_total != num_steps * num_running:
        raise BenchmarkError("not every sequence got a token in every step")
    runner_s = after.runner_seconds_total - before.runner_seconds_total
    return (elapsed_s - runner_s) * 1e3 / num_steps


def _submit(client: "zmq.Socket[bytes]", num_requests: int, sampling: dict[str, float], num_steps: int) -> None:
    params = SamplingParams(max_tokens=num_steps + PROMPT_TOKENS, ignore_eos=True, **sampling)  # type: ignore[arg-type]
    for number in range(num_requests):
        request = GenerateRequest(
            request_id=str(number), prompt_token_ids=[number, *range(1, PROMPT_TOKENS)], sampling=params
        )
        client.send(msgspec.msgpack.encode(Submit(number, request)))
