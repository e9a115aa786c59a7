"""Model M served beside vLLM's server, both in bf16, by the served workload of other benchmarks: whoever serves a model
of half a billion weights on a processor waits for matrix products, and for what is scheduled around them."""

import time
from collections import defaultdict
from pathlib import Path

from benchmarks.figures import Figure, ReportProgress, Target
from benchmarks.models import M, build_m
from benchmarks.offline.environments import VLLM, interpreter
from benchmarks.server import running_server
from benchmarks.serving import SERVED, drive, milliseconds
from benchmarks.streaming.peers import IDLE_S, Peer, sluice, vllm
from sluice.gateway.checkpoint import find_checkpoint
from sluice.load.config import RequestPace

ROWS = {f"{streams} streams": RequestPace(concurrency=streams, num_requests=2 * streams) for streams in (8, 32)}
RATIO_TARGET = Target(1.05, is_ceiling=False)
OUTPUT = "output"


def measure(num_repeats: int, folder: Path, only: str | None, report: ReportProgress) -> list[Figure]:
    """Measure 8 and 32 streams; Sluice and vLLM take turns in an order that changes with each repeat."""
    python = interpreter(VLLM, folder / "envs", report)
    checkpoint = build_m(folder / "models", find_checkpoint(None))
    rows = {name: pace for name, pace in ROWS.items() if only is None or only in name}
    samples: dict[tuple[str, str, str, str], list[float]] = defaultdict(list)
    report("starting vLLM; two minutes")
    with (
        vllm(python, folder, checkpoint=checkpoint) as theirs,
        sluice(lambda: running_server(checkpoint, folder / "served.log")) as mine,
    ):
        for repeat in range(-1, num_repeats):  # the first warms up: vLLM compiles for each new size of a batch
            for row, pace in rows.items():
                for peer in (mine, theirs) if repeat % 2 == 0 else (theirs, mine):
                    time.sleep(IDLE_S)
                    values = _turn(peer, pace)
                    report(f"{peer.name}, {row}: " + ", ".join(f"{n} {v:.5g} {u}" for (n, u), v in values.items()))
                    if repeat >= 0:
                        for (name, unit), value in values.items():
                            samples[name, peer.name, row, unit].append(value)
    figures = [Figure(name, f"{peer}, {row}", unit, tuple(found)) for (name, peer, row, unit), found in samples.items()]
    for row in rows:
        ours, theirs_ = (samples[OUTPUT, peer, row, "tokens/s"] for peer in (mine.name, theirs.name))
        ratios = tuple(mine_ / other for mine_, other in zip(ours, theirs_, strict=True))
        figures.append(Figure("tokens/s of model M", row, "times vLLM's", ratios, RATIO_TARGET))
    return figures


def _turn(peer: Peer, pace: RequestPace) -> dict[tuple[str, str], float]:
    found = drive(f"http://127.0.0.1:{peer.port}", None, M["vocab_size"], (SERVED[0], pace)).summary
    return {
        (OUTPUT, "tokens/s"): found.output_tokens_per_s,
        ("TTFT p50", "ms"): milliseconds(found.ttft_ms.p50),
        ("ITL p50", "ms"): milliseconds(found.itl_ms.p50),
        ("ITL p99", "ms"): milliseconds(found.itl_ms.p99),
    }
