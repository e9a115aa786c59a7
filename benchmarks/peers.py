"""The same workloads against any other OpenAI-compatible server that is already running."""

from benchmarks.figures import Figure
from benchmarks.workloads import SERVED, SINGLE, drive, milliseconds


def measure(url: str, model: str | None, vocab_size: int, num_repeats: int) -> list[Figure]:
    """Latency alone and throughput in a crowd, as in serving.py, without what only shows from inside."""
    single = [drive(url, model, vocab_size, SINGLE).summary for _ in range(num_repeats)]
    served = [drive(url, model, vocab_size, SERVED).summary for _ in range(num_repeats)]
    columns = {
        ("single stream TTFT p50", "ms"): [milliseconds(run.ttft_ms.p50) for run in single],
        ("single stream ITL p50", "ms"): [milliseconds(run.itl_ms.p50) for run in single],
        ("served output", "tokens/s"): [run.output_tokens_per_s for run in served],
        ("served TTFT p50", "ms"): [milliseconds(run.ttft_ms.p50) for run in served],
        ("served ITL p50", "ms"): [milliseconds(run.itl_ms.p50) for run in served],
        ("served ITL p99", "ms"): [milliseconds(run.itl_ms.p99) for run in served],
    }
    return [Figure(name, url, unit, tuple(samples)) for (name, unit), samples in columns.items()]
