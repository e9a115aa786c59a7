"""Writes the metrics page: Prometheus' text format, or OpenMetrics, as the scraper asks.

The library's own writers take 10 microseconds a line, so that a page of a hundred models would hold up the event loop
for a fifth of a second. Names and labels here are all of the old alphabet, so no escaping of names is needed, and the
lines of a histogram come from a template that is made once for each series.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import accumulate
from math import isfinite, isnan

from prometheus_client import CollectorRegistry
from prometheus_client.core import Exemplar, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Sample

from sluice.gateway.telemetry.families import BucketFamily, ValueFamily, bound_texts
from sluice.record.histogram import Histogram

Encode = Callable[[CollectorRegistry], bytes]
_OPENMETRICS = "application/openmetrics-text"
_MADE_BY_LIBRARY = ("_created", "_gsum", "_gcount")
"""Endings of samples that are families of their own in Prometheus' format."""
_TOTAL = "_total"
_COUNTER_ENDINGS = (_TOTAL, "_created")
_MAX_TEMPLATES = 1 << 16


def choose_writer(accept: str) -> tuple[Encode, str]:
    """Return what writes the format that a header `accept` asks for, and its content type."""
    _, content_type = choose_encoder(accept)
    return (write_openmetrics if content_type.startswith(_OPENMETRICS) else write_text), content_type


def write_text(registry: CollectorRegistry) -> bytes:
    """Return the page in Prometheus' text format."""
    return "".join(part for metric in registry.collect() for part in _text_family(metric)).encode()


def write_openmetrics(registry: CollectorRegistry) -> bytes:
    """Return the page in OpenMetrics, with exemplars."""
    parts = [part for metric in registry.collect() for part in _openmetrics_family(metric)]
    return "".join([*parts, "# EOF\n"]).encode()


def _text_family(metric: Metric) -> Iterator[str]:
    name, kind = metric.name, metric.type
    if kind == "counter":
        name += "_total"
    yield _head(name, "untyped" if kind == "unknown" else kind, metric.documentation)
    if isinstance(metric, BucketFamily | ValueFamily):
        yield "".join(_rows(metric))
        return
    later: dict[str, list[str]] = {}
    for sample in metric.samples:
        if sample.name.endswith(_MADE_BY_LIBRARY) and sample.name != metric.name:
            later.setdefault(sample.name, []).append(_line(sample))
        else:
            yield _line(sample)
    for sample_name, lines in later.items():
        yield _head(sample_name, "gauge", metric.documentation)
        yield from lines


def _openmetrics_family(metric: Metric) -> Iterator[str]:
    is_counter = str(metric.type) == "counter"
    name = metric.name.removesuffix(_TOTAL) if is_counter else metric.name
    yield f"# HELP {name} {_escape(metric.documentation)}\n# TYPE {name} {metric.type}\n"
    if isinstance(metric, BucketFamily | ValueFamily):
        yield "".join(_rows(metric, has_exemplars=True))
        return
    for sample in metric.samples:
        # OpenMetrics refuses a counter's sample under the bare name that Triton's have in Prometheus' format.
        is_bare = is_counter and not sample.name.endswith(_COUNTER_ENDINGS)
        line = _line(sample._replace(name=name + _TOTAL) if is_bare else sample)
        yield line if sample.exemplar is None else f"{line[:-1]}{_exemplar(sample.exemplar)}\n"


def _head(name: str, kind: str, text: str) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return f"# HELP {name} {escaped}\n# TYPE {name} {kind}\n"


def _line(sample: Sample) -> str:
    labels = ",".join([f'{name}="{_escape(value)}"' for name, value in sample.labels.items()])
    return (
        f"{sample.name}{{{labels}}} {_number(sample.value)}\n" if labels else f"{sample.name} {_number(sample.value)}\n"
    )


def _rows(family: BucketFamily | ValueFamily, *, has_exemplars: bool = False) -> Iterable[str]:
    names = family.label_names
    if isinstance(family, ValueFamily):
        name = family.sample_name
        return [
            f"{name}{_labels(names, labels)} {repr(value) if isfinite(value) else _number(value)}\n"
            for labels, value in family.rows
        ]
    return [_histogram(family, *row, has_exemplars=has_exemplars) for row in family.rows]


def _histogram(family: BucketFamily, labels: tuple[str, ...], found: Histogram, *, has_exemplars: bool) -> str:
    cumulative = tuple(accumulate(found.counts))
    template = _template(family.name, family.label_names, labels, family.bounds)
    if not has_exemplars or not found.exemplars:
        return template % (*cumulative, cumulative[-1], _number(found.total))
    lines = (template % (*cumulative, cumulative[-1], _number(found.total))).splitlines()
    for index, exemplar in found.exemplars.items():
        lines[index] += _exemplar(Exemplar(*exemplar))
    return "\n".join(lines) + "\n"


@lru_cache(_MAX_TEMPLATES)
def _template(name: str, names: tuple[str, ...], labels: tuple[str, ...], bounds: tuple[float, ...]) -> str:
    """Return the lines of a series, to be filled with the counts, their sum and the sum of the values."""
    shown = _labels(names, labels).replace("%", "%%")
    within = f"{shown[1:-1]}," if shown else ""
    buckets = [f'{name}_bucket{{{within}le="{bound}"}} %d\n' for bound in bound_texts(bounds)]
    return "".join([*buckets, f"{name}_count{shown} %d\n", f"{name}_sum{shown} %s\n"])


@lru_cache(_MAX_TEMPLATES)
def _labels(names: tuple[str, ...], labels: tuple[str, ...]) -> str:
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, labels, strict=True))
    return f"{{{pairs}}}" if pairs else ""


@lru_cache(_MAX_TEMPLATES)
def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    if isfinite(value):
        return repr(float(value))  # a truth is a number too
    return "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"


def _exemplar(exemplar: Exemplar) -> str:
    labels = ",".join(f'{name}="{_escape(value)}"' for name, value in exemplar.labels.items())
    when = "" if exemplar.timestamp is None else f" {float(exemplar.timestamp)}"
    return f" # {{{labels}}} {_number(exemplar.value)}{when}"
