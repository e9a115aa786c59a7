"""`sluice serve` with an 8B under HTTP load, beside the engine alone with the same requests."""

import json
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks.figures import BenchmarkError
from benchmarks.gpu.executor import BLOCK_SIZE, Lengths, run_batch
from benchmarks.gpu.models import config_for, random_runner
from benchmarks.gpu.parts import Notes, Setting
from benchmarks.gpu.shapes import checkpoint_of, large
from benchmarks.server import Server, running_server
from benchmarks.serving import drive, milliseconds
from sluice.load.config import RequestPace, TokenRange, Workload

ROUNDS = 2
"""Requests of each client."""
SEEDED = {
    "prompt": [7, 8, 9],
    "max_tokens": 16,
    "temperature": 0.8,
    "seed": 1,
    "ignore_eos": True,
    "return_token_ids": True,
}


def measure(setting: Setting, notes: Notes) -> None:
    clients, lengths = ((1, 3), (10, 6)) if setting.is_tiny else ((1, 32, 256), (128, 128))
    limits = {
        "max_num_seqs": max(clients),
        "max_num_batched_tokens": 2048,
        "num_blocks": max(clients) * -(-(sum(lengths) + 1) // BLOCK_SIZE),
    }
    alone = _engine_alone(setting, notes, clients, lengths, limits)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in limits.items()]
    options += ["--runtime=torch", f"--device={setting.device}", "--dtype=bf16"]
    options += ["--num-threads=1"] if setting.device == "cpu" else []
    log = setting.out / "serve.log"
    checkpoint = checkpoint_of(large(setting), setting)
    with running_server(checkpoint, log, *options) as server:
        _check_seeds(server, checkpoint, notes)
        for count in clients:
            _measure_clients(setting, server, notes, count, lengths, alone[count])


def _engine_alone(
    setting: Setting, notes: Notes, clients: tuple[int, ...], lengths: Lengths, limits: dict[str, int]
) -> dict[int, float]:
    """Return the tokens/s of the executor in this process, by number of clients."""
    rates = {}
    with random_runner(setting, large(setting), limits) as runner:
        for count in clients:
            config = config_for(setting, "", **{**limits, "max_num_seqs": count})
            rates[count] = run_batch(runner, config, [lengths] * count * ROUNDS).tokens_per_s
            notes.note(f"clients {count}", engine_tokens_per_s=rates[count])
    return rates


def _measure_clients(
    setting: Setting, server: Server, notes: Notes, count: int, lengths: Lengths, alone: float
) -> None:
    prompt, output = (TokenRange(each, each) for each in lengths)
    pace = RequestPace(concurrency=count, num_requests=count * ROUNDS, warmup=1)
    summary = drive(server.url, None, large(setting).config["vocab_size"], (Workload(prompt, output), pace)).summary
    notes.note(
        f"clients {count}",
        tokens_per_s=summary.output_tokens_per_s,
        of_engine=summary.output_tokens_per_s / alone,
        ttft_ms=milliseconds(summary.ttft_ms.p50),
        itl_ms=milliseconds(summary.itl_ms.p50),
        failed=summary.num_failed,
    )


def _check_seeds(server: Server, checkpoint: Path, notes: Notes) -> None:
    """Draw the same answer twice with one seed."""
    body = json.dumps({"model": checkpoint.name, **SEEDED}).encode()
    request = Request(f"{server.url}/v1/completions", body, {"content-type": "application/json"})
    answers = []
    for _ in range(2):
        try:
            with urlopen(request, timeout=60) as response:
                answers.append(json.load(response)["choices"][0]["token_ids"])
        except HTTPError as error:
            raise BenchmarkError(f"the server answered {error.code}: {error.read().decode()}") from error
    notes.note("seed", is_reproducible=answers[0] == answers[1], tokens=len(answers[0]))
