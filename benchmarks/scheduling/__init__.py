"""The scheduler under load, through the real executor: overload, fairness, a long queue, chunked prefill."""

from pathlib import Path

from benchmarks.figures import Figure
from benchmarks.scheduling import chunking, fairness, idle_queue, overload
from sluice.gateway.checkpoint import find_checkpoint


def measure(num_repeats: int, folder: Path, model: Path | None) -> list[Figure]:
    """Measure all of it with the bundled model (or the checkpoint `model`) and, for long prompts, with model S."""
    checkpoint = model or find_checkpoint(None)
    return [
        *overload.measure(num_repeats, checkpoint),
        *fairness.measure(num_repeats, checkpoint),
        *idle_queue.measure(num_repeats),
        *chunking.measure(num_repeats, folder, checkpoint),
    ]
