"""The metrics pages of servers: which of their figures a report shows, and their values."""

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample


@dataclass(frozen=True, slots=True)
class Dialect:
    """The names of figures on one server's page. Each may be missing."""

    software: str
    phases: dict[str, str]
    """Histograms of seconds, by the phase of a request that they measure."""
    running: str
    waiting: str
    batch: str | None = None
    """A histogram of the sequences in a step."""
    gpus: str | None = None
    """A gauge with a label `num_gpus`."""


DIALECTS = (
    Dialect(
        "Sluice",
        {
            "queue": "sluice_engine_queue_seconds",
            "prefill": "sluice_engine_prefill_seconds",
            "decode": "sluice_request_decode_seconds",
        },
        "sluice_sequences_running",
        "sluice_sequences_waiting",
        "sluice_engine_step_sequences",
        "sluice_engine_info",
    ),
    Dialect(
        "vLLM",
        {
            "queue": "vllm:request_queue_time_seconds",
            "prefill": "vllm:request_prefill_time_seconds",
            "decode": "vllm:request_decode_time_seconds",
        },
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    ),
    Dialect("SGLang", {"queue": "sglang:queue_time_seconds"}, "sglang:num_running_reqs", "sglang:num_queue_reqs"),
    Dialect(
        "TGI",
        {"queue": "tgi_request_queue_duration", "inference": "tgi_request_inference_duration"},
        "tgi_batch_current_size",
        "tgi_queue_size",
    ),
)
_MODEL_LABELS = ("model", "model_name")


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of a histogram's values and their number."""

    sum: float = 0.0
    count: float = 0.0

    def since(self, before: "Total") -> "Total":
        return Total(self.sum - before.sum, self.count - before.count)

    @property
    def mean(self) -> float | None:
        return self.sum / self.count if self.count > 0 else None


@dataclass(frozen=True, slots=True)
class MetricsReading:
    """A reading of a page."""

    phases: dict[str, Total]
    running: float
    waiting: float
    batch: Total
    num_gpus: int | None


def dialect_of(page: str) -> Dialect | None:
    """Return the dialect of a page, None for a server that is not known."""
    return next((each for each in DIALECTS if f"\n{each.running}" in f"\n{page}"), None)


def read_page(page: str, dialect: Dialect, model: str) -> MetricsReading:
    """Read a page: the values of `model`, or of all models where none has its name."""
    samples = list(_samples(page, dialect))
    if any(_model(each) == model for each in samples):
        samples = [each for each in samples if _model(each) == model]

    def total(name: str | None) -> Total:
        return Total(_add(samples, f"{name}_sum"), _add(samples, f"{name}_count"))

    gpus = [int(each.labels["num_gpus"]) for each in samples if each.name == dialect.gpus]
    return MetricsReading(
        {phase: total(name) for phase, name in dialect.phases.items()},
        _add(samples, dialect.running),
        _add(samples, dialect.waiting),
        total(dialect.batch),
        sum(gpus) or None,
    )


def _samples(page: str, dialect: Dialect) -> Iterator[Sample]:
    """Parse the lines that are read, which are few of the many of a page."""
    names = (dialect.running, dialect.waiting, *dialect.phases.values(), dialect.batch, dialect.gpus)
    starts = tuple(name for name in names if name is not None)
    lines = [line for line in page.splitlines() if line.startswith(starts) and "_bucket" not in line]
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        yield from family.samples


def _add(samples: list[Sample], name: str) -> float:
    return sum(each.value for each in samples if each.name == name)


def _model(sample: Sample) -> str | None:
    return next((sample.labels[label] for label in _MODEL_LABELS if label in sample.labels), None)
