"""The comparison: all engines in turn in each repeat, so that noise affects them alike, and ratios of each repeat."""

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.offline import engines
from benchmarks.offline.engines import MODELS, Model
from benchmarks.offline.protocol import Request
from benchmarks.offline.worker import Launch, Worker, running_worker
from sluice.gateway.checkpoint import find_checkpoint

Samples = dict[tuple[str, str], list[float]]
"""Samples by figure and engine."""

SINGLES = 3
"""Number of runs of the single stream in each repeat."""
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
"""Ratios of Sluice's figure to a peer's: (figure, peer, target by model)."""
NUM_REQUESTS = 64
PROMPT_TOKENS, OUTPUT_TOKENS = (32, 256), (64, 192)
SINGLE_TOKENS = (128, 128)
FILLING_TOKENS = 512
LENGTHS_SEED, FILLING_SEED = 0, 1 << 32
"""Lengths are the same for every engine and repeat. Tokens differ, or an engine with a prefix cache would find those of
the last repeat and compute nothing."""


def measure(num_repeats: int, folder: Path, names: tuple[str, ...] = ("S", "M")) -> list[Figure]:
    """Compare both models on all engines. A peer that cannot be installed or loaded is reported as absent."""
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"  [{time.monotonic() - started:4.0f} s] {line}", flush=True)

    figures: list[Figure] = []
    for model in MODELS:
        if model.name in names:
            figures += figures_of(model, _compare(model, num_repeats, folder, report))
    print(markdown(figures), flush=True)
    return figures


def _compare(model: Model, num_repeats: int, folder: Path, report: ReportProgress) -> Samples:
    samples: Samples = defaultdict(list)
    with ExitStack() as stack:
        workers = list(_start(model, folder, report, stack))
        for worker in workers:
            samples[LAUNCH, worker.engine].append(worker.launch_s)
            report(f"{model.name}: warming up {worker.version}")
            _warm_up(worker, model)
        for repeat in range(1, num_repeats + 1):
            for worker in workers:
                values = dict(_measure(worker, model, repeat))
                for figure, value in values.items():
                    samples[figure, worker.engine].append(value)
                shown = ", ".join(f"{figure} {value:.4g} {UNITS[figure]}" for figure, value in values.items())
                report(f"{model.name}: {repeat}/{num_repeats} {worker.engine}: {shown}")
    return samples


def _warm_up(worker: Worker, model: Model) -> None:
    for requests in filling_requests(model.vocab_size, model.kv_cache_tokens):
        worker.batch(requests)
    worker.batch(batch_requests(model.vocab_size, seed=0, output_share=model.warmup_share))
    worker.single(single_request(model.vocab_size, seed=0))


def _start(model: Model, folder: Path, report: ReportProgress, stack: ExitStack) -> Iterator[Worker]:
    """Yield a worker for each engine, launched one after the other once all are installed."""
    for launch in list(_prepare(model, folder, report)):
        report(f"{model.name}: launching {launch.engine}")
        with _skip_if_absent(model, launch.engine, report):
            log = folder / f"offline-{launch.engine}-{model.name}.log"
            yield stack.enter_context(running_worker(launch, log))


def _prepare(model: Model, folder: Path, report: ReportProgress) -> Iterator[Launch]:
    checkpoint = model.make(folder / "models", find_checkpoint(None))
    for engine, launch_of in engines.ENGINES.items():
        with _skip_if_absent(model, engine, report):
            yield launch_of(checkpoint, model, folder, report)


@contextmanager
def _skip_if_absent(model: Model, engine: str, report: ReportProgress) -> Iterator[None]:
    """Report a peer that fails to start and go on without it. A failure of Sluice itself is raised."""
    try:
        yield
    except BenchmarkError as error:
        if engine == engines.OURS:
            raise
        report(f"{model.name}: {engine} is ABSENT: {error}")


def _measure(worker: Worker, model: Model, repeat: int) -> Iterator[tuple[str, float]]:
    yield BATCH, worker.batch(batch_requests(model.vocab_size, seed=repeat))
    runs = [worker.single(single_request(model.vocab_size, seed=repeat * SINGLES + i)) for i in range(SINGLES)]
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
    """Return a ratio for each repeat, whose measurements were taken shortly after each other."""
    return tuple(ours / theirs for ours, theirs in zip(samples[name, engines.OURS], samples[name, peer], strict=True))


def markdown(figures: Sequence[Figure]) -> str:
    """Format medians as a Markdown table: a row for each figure, a column for each engine and ratio, with targets."""
    columns = list(dict.fromkeys(figure.subject for figure in figures))
    cells = {(figure.name, figure.subject): _table_cell(figure) for figure in figures}
    rows = list(dict.fromkeys((figure.name, _unit(figures, figure.name)) for figure in figures))
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for name, unit in rows:
        values = " | ".join(cells.get((name, column), "") for column in columns)
        lines.append(f"| {name}, {unit} | {values} |")
    return "\n".join(lines)


def _unit(figures: Sequence[Figure], name: str) -> str:
    return next(figure.unit for figure in figures if figure.name == name)


def _table_cell(figure: Figure) -> str:
    value = f"{figure.median:,.0f}" if figure.median >= 1000 else f"{figure.median:.3g}"
    if figure.target is None:
        return value
    return f"{value} ({figure.target}{'' if figure.target.is_met_by(figure.median) else ', missed'})"


def batch_requests(vocab_size: int, seed: int, output_share: float = 1.0) -> list[Request]:
    """Return 64 requests with prompts of 32..256 tokens and outputs of 64..192 tokens times `output_share`, uniform."""
    lengths, tokens = random.Random(LENGTHS_SEED), random.Random(seed)
    sizes = [(lengths.randint(*PROMPT_TOKENS), lengths.randint(*OUTPUT_TOKENS)) for _ in range(NUM_REQUESTS)]
    return [(_prompt(tokens, size, vocab_size), max(1, int(length * output_share))) for size, length in sizes]


def single_request(vocab_size: int, seed: int) -> Request:
    """Return a request of 128 prompt tokens and 128 output tokens."""
    num_prompt, num_output = SINGLE_TOKENS
    return _prompt(random.Random(seed), num_prompt, vocab_size), num_output


def filling_requests(vocab_size: int, num_tokens: int) -> Iterator[list[Request]]:
    """Yield batches that together write `num_tokens` tokens into a KV cache.

    The system provides memory when it is first written, which is slow. Engines that do not write their whole cache at
    launch would otherwise do so within the measurement.
    """
    tokens = random.Random(FILLING_SEED)
    for first in range(0, num_tokens, NUM_REQUESTS * FILLING_TOKENS):
        num_requests = min(NUM_REQUESTS, -(-(num_tokens - first) // FILLING_TOKENS))
        yield [(_prompt(tokens, FILLING_TOKENS, vocab_size), 1) for _ in range(num_requests)]


def _prompt(tokens: random.Random, size: int, vocab_size: int) -> list[int]:
    return [tokens.randrange(vocab_size) for _ in range(size)]
