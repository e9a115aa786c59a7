"""The engines in turn, repeat by repeat, so that a noisy minute hits all alike; medians, and ratios pair by pair."""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, Target
from benchmarks.offline import engines, workload
from benchmarks.offline.engines import MODELS, Model
from benchmarks.offline.environments import Say
from benchmarks.offline.table import markdown
from benchmarks.offline.worker import Launch, Worker, running_worker
from gateway.checkpoint import find_checkpoint

Samples = dict[tuple[str, str], list[float]]
"""By figure and engine."""

SINGLES = 3
"""Runs of the single stream in each repeat."""
BATCH, ITL, TTFT, LAUNCH, MEMORY = (
    "batch output",
    "single ITL p50",
    "single TTFT",
    "launch to first token",
    "memory, RSS",
)
UNITS = {BATCH: "tokens/s", ITL: "ms", TTFT: "ms", LAUNCH: "s", MEMORY: "MB"}
RATIOS: tuple[tuple[str, str, dict[str, Target]], ...] = (
    (BATCH, "vLLM", {"S": Target(1.3, is_ceiling=False), "M": Target(1.05, is_ceiling=False)}),
    (BATCH, "GenAI", {"S": Target(1.0, is_ceiling=False), "M": Target(1.0, is_ceiling=False)}),
    (ITL, "vLLM", {"S": Target(0.6)}),
    (ITL, "GenAI", {}),
)
"""Sluice's figure over whose, and what it must reach for which model."""


def measure(num_repeats: int, folder: Path, names: tuple[str, ...] = ("S", "M")) -> list[Figure]:
    """Both models on all engines. A peer that cannot be installed or does not load is said to be absent."""
    started = time.monotonic()

    def say(line: str) -> None:
        print(f"  [{time.monotonic() - started:4.0f} s] {line}", flush=True)

    figures: list[Figure] = []
    for model in MODELS:
        if model.name in names:
            figures += figures_of(model, _compare(model, num_repeats, folder, say))
    print(markdown(figures), flush=True)
    return figures


def _compare(model: Model, num_repeats: int, folder: Path, say: Say) -> Samples:
    samples: Samples = defaultdict(list)
    with ExitStack() as stack:
        workers = list(_start(model, folder, say, stack))
        for worker in workers:
            samples[LAUNCH, worker.engine].append(worker.launch_s)
            say(f"{model.name}: warming up {worker.version}")
            _warm_up(worker, model)
        for repeat in range(1, num_repeats + 1):
            for worker in workers:
                values = dict(_measure(worker, model, repeat))
                for figure, value in values.items():
                    samples[figure, worker.engine].append(value)
                shown = ", ".join(f"{figure} {value:.4g} {UNITS[figure]}" for figure, value in values.items())
                say(f"{model.name}: {repeat}/{num_repeats} {worker.engine}: {shown}")
    return samples


def _warm_up(worker: Worker, model: Model) -> None:
    for requests in workload.filling(model.vocab_size, model.kv_cache_tokens):
        worker.batch(requests)
    worker.batch(workload.batch(model.vocab_size, seed=0, output_share=model.warmup_share))
    worker.single(workload.single(model.vocab_size, seed=0))


def _start(model: Model, folder: Path, say: Say, stack: ExitStack) -> Iterator[Worker]:
    """A worker for each engine, launched one after the other once everything is installed."""
    for launch in list(_prepare(model, folder, say)):
        say(f"{model.name}: launching {launch.engine}")
        with _absence_told(model, launch.engine, say):
            log = folder / f"offline-{launch.engine}-{model.name}.log"
            yield stack.enter_context(running_worker(launch, log))


def _prepare(model: Model, folder: Path, say: Say) -> Iterator[Launch]:
    checkpoint = model.make(folder / "models", find_checkpoint(None))
    for engine, launch_of in engines.ENGINES.items():
        with _absence_told(model, engine, say):
            yield launch_of(checkpoint, model, folder, say)


@contextmanager
def _absence_told(model: Model, engine: str, say: Say) -> Iterator[None]:
    """A peer that cannot be had is left out; without Sluice itself there is nothing to compare."""
    try:
        yield
    except BenchmarkError as error:
        if engine == engines.OURS:
            raise
        say(f"{model.name}: {engine} is ABSENT: {error}")


def _measure(worker: Worker, model: Model, repeat: int) -> Iterator[tuple[str, float]]:
    yield BATCH, worker.batch(workload.batch(model.vocab_size, seed=repeat))
    runs = [worker.single(workload.single(model.vocab_size, seed=repeat * SINGLES + i)) for i in range(SINGLES)]
    gaps = [later - earlier for times in runs for earlier, later in pairwise(times)]
    yield ITL, statistics.median(gaps) * 1e3
    yield TTFT, statistics.median(times[0] for times in runs) * 1e3
    yield MEMORY, worker.rss_mb()


def figures_of(model: Model, samples: Samples) -> list[Figure]:
    absolute = [
        Figure(f"{model.name} {name}", engine, UNITS[name], tuple(values))
        for (name, engine), values in sorted(samples.items(), key=lambda item: list(UNITS).index(item[0][0]))
    ]
    return absolute + [
        Figure(
            f"{model.name} {name}",
            f"{engines.OURS} / {peer}",
            "x",
            _ratios(samples, name, peer),
            targets.get(model.name),
        )
        for name, peer, targets in RATIOS
        if (name, peer) in samples
    ]


def _ratios(samples: Samples, name: str, peer: str) -> tuple[float, ...]:
    """One a repeat: what was measured within the same minute."""
    return tuple(ours / theirs for ours, theirs in zip(samples[name, engines.OURS], samples[name, peer], strict=True))
