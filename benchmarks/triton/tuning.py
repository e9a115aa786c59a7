"""The tuning of a text classification pipeline step by step, as a guide to Triton describes it.

The guide's machine has two GPUs and several cores for tokenizers. Here all of it runs on this machine's cores, with the
guide's configurations (tests/data/seed_configs/004_tuning_*.pbtxt).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.triton.pipeline import ENCODER, NUM_TOKENS, PIPELINE, TEXT, write_pipeline
from benchmarks.triton.servers import V2Server, sluice
from benchmarks.triton.wrk import WrkResult, check_wrk, wrk

_CONFIGS = Path(__file__).parents[2] / "tests" / "data" / "seed_configs"
CLIENTS = 100
"""Number of clients, as many as the guide's perf_analyzer has."""
ENCODER_CLIENTS = 64
SECONDS = 5.0
_WARM_S = 1.0
_TEXT_REQUEST: dict[str, object] = {"inputs": [{"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [TEXT]}]}
_IDS_REQUEST: dict[str, object] = {
    "inputs": [
        {"name": "input_ids", "shape": [1, NUM_TOKENS], "datatype": "INT64", "data": list(range(1, NUM_TOKENS + 1))}
    ]
}


@dataclass(frozen=True, slots=True)
class Step:
    """Additions to the configurations of tokenizer and encoder, and the guide's figures with them."""

    name: str
    their_rate: float
    their_p99_ms: float
    tokenizer: tuple[str, ...] = ()
    encoder: tuple[str, ...] = ()


_BATCHING, _CPUS, _GPUS, _WARMUP = "dynamic_batching", "cpu_instances", "gpu_instances", "warmup"
STEPS = (
    Step("baseline", 50, 500),
    Step("+ dynamic batching of the encoder", 150, 200, (), (_BATCHING,)),
    Step("+ 4 tokenizer instances", 400, 120, (_CPUS,), (_BATCHING,)),
    Step("+ 2 encoder instances a GPU", 800, 95, (_CPUS,), (_BATCHING, _GPUS)),
    Step("+ warm-up", 800, 92, (_CPUS,), (_BATCHING, _GPUS, _WARMUP)),
)


def measure(repeats: int, out: Path, report: ReportProgress) -> list[Figure]:
    """Measure throughput and p99 of every step beside the guide's, and the gain of batching for the encoder alone."""
    check_wrk()
    folder = out.resolve() / "triton" / "tuning"
    figures: list[Figure] = []
    for step in STEPS:
        figures += _step_figures(step, _measure_step(step, folder, repeats, report))
    return figures + _encoder_gain(folder, repeats, report)


def _measure_step(step: Step, folder: Path, repeats: int, report: ReportProgress) -> list[WrkResult]:
    with _serving(step, folder) as server:
        results = [wrk(server, PIPELINE, _TEXT_REQUEST, CLIENTS, SECONDS) for _ in range(repeats)]
    for result in results:
        report(f"{step.name}: {result.rate:,.0f} requests/s, p99 {result.p99_ms:.0f} ms")
    return results


def _serving(step: Step, folder: Path) -> AbstractContextManager[V2Server]:
    write_pipeline(folder / "models", _config(step.tokenizer), _config(step.encoder))
    return sluice(folder / "models", folder / "sluice.log")


def _config(pieces: Sequence[str]) -> str:
    return "\n".join((_CONFIGS / f"004_tuning_{piece}.pbtxt").read_text() for piece in pieces)


def _step_figures(step: Step, results: Sequence[WrkResult]) -> list[Figure]:
    rate, p99 = "pipeline, requests/s", "pipeline, p99"
    return [
        Figure(f"{rate}, {step.name}", "sluice", "requests/s", tuple(each.rate for each in results)),
        Figure(f"{rate}, {step.name}", "the guide", "requests/s", (step.their_rate,)),
        Figure(f"{p99}, {step.name}", "sluice", "ms", tuple(each.p99_ms for each in results)),
        Figure(f"{p99}, {step.name}", "the guide", "ms", (step.their_p99_ms,)),
    ]


def _encoder_gain(folder: Path, repeats: int, report: ReportProgress) -> list[Figure]:
    """Measure the encoder alone, in turns without and with dynamic batching."""
    pairs = []
    for _ in range(repeats):
        rates = []
        for step in STEPS[:2]:
            with _serving(step, folder) as server:
                rates.append(_encoder_rate(server))
        pairs.append((rates[0], rates[1]))
        report(f"encoder alone: {rates[0]:,.0f} requests/s, with dynamic batching {rates[1]:,.0f}")
    name = f"encoder, {ENCODER_CLIENTS} clients"
    gains = tuple(batched / single for single, batched in pairs)
    return [
        Figure(name, "one by one", "requests/s", tuple(single for single, _ in pairs)),
        Figure(name, "dynamic batching", "requests/s", tuple(batched for _, batched in pairs)),
        Figure(name, "gain", "ratio", gains, Target(5.0, is_ceiling=False)),
    ]


def _encoder_rate(server: V2Server) -> float:
    wrk(server, ENCODER, _IDS_REQUEST, ENCODER_CLIENTS, _WARM_S)
    return wrk(server, ENCODER, _IDS_REQUEST, ENCODER_CLIENTS, SECONDS).rate
