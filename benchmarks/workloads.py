"""The workloads of docs/performance.md, run by `sluice load`'s own code, the same for Sluice and for its peers."""

from benchmarks.figures import BenchmarkError
from load.config import LoadConfig, LoadTarget, RequestPace, TokenRange, Workload
from load.run import Run, run_blocking

SINGLE = (Workload(TokenRange(128, 128), TokenRange(128, 128)), RequestPace(concurrency=1, num_requests=6, warmup=1))
"""One stream: 128 prompt tokens, 128 new."""
SERVED = (Workload(TokenRange(32, 256), TokenRange(64, 192)), RequestPace(concurrency=32, num_requests=64, warmup=4))
"""64 requests, 32 at a time."""
CROWD = (Workload(TokenRange(32, 32), TokenRange(128, 128)), RequestPace(concurrency=64, num_requests=192, warmup=4))
"""64 streams at all times, long enough for the kernel's coarse accounting of CPU time."""
FIRST = (Workload(TokenRange(8, 8), TokenRange(1, 1)), RequestPace(concurrency=1, num_requests=1))
"""The first token ever served."""


def drive(url: str, model: str | None, vocab_size: int, workload_and_pace: tuple[Workload, RequestPace]) -> Run:
    """Run a workload over /v1/completions with prompts of random ids below `vocab_size`.

    Raises `BenchmarkError` where a request failed: figures of a faulty run say nothing.
    """
    workload, pace = workload_and_pace
    exact = Workload(workload.prompt_tokens, workload.output_tokens, vocab_size=vocab_size)
    run = run_blocking(LoadConfig(LoadTarget(url, model=model), pace, exact))
    if run.summary.num_failed or run.was_interrupted:
        label, failure = next(iter(run.summary.failures.items()), ("interrupted", None))
        raise BenchmarkError(f"{run.summary.num_failed} requests failed: {label}: {failure and failure.example}")
    return run


def milliseconds(value: float | None) -> float:
    """A percentile that must exist, since every request was served."""
    if value is None:
        raise BenchmarkError("the streams brought too few token events to time")
    return value
