"""Our writer of the metrics page says what the library's own writers say."""

import math

import pytest
from prometheus_client import CollectorRegistry, Counter, Summary
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from sluice.gateway.telemetry.exposition import choose_writer
from sluice.gateway.telemetry.families import BucketFamily, ValueFamily
from sluice.record.histogram import Histogram

ODD = 'a "name"\\of\nlines, 100 % {odd}'
FORMATS = ("", "application/openmetrics-text;version=1.0.0,text/plain;q=0.5", "text/plain;version=1.0.0")


class Families:
    """Families of every kind that the page has, with odd labels and values."""

    def collect(self) -> list[Metric]:
        tally = Histogram((0.5, 1, 2.5))
        for value in (0.25, 0.5, 2.0, 99.0):
            tally.add(value)
        tally.add_traced(0.75, {"trace_id": "ab" * 16, "span_id": "cd" * 8}, 1234.5)
        buckets = BucketFamily("sluice_times_seconds", "Times.\nIn seconds.", tally.bounds, ("model",))
        buckets.add((ODD,), tally)
        buckets.add(("plain",), tally)
        bare = BucketFamily("sluice_bare", "Without labels.", tally.bounds, ())
        bare.add((), tally)
        counts = ValueFamily("sluice_counts", "Counts.", "counter", ("model", "kind"))
        counts.add((ODD, "prompt"), 3.0)
        counts.add(("plain", "prompt"), 1e21)
        odd = GaugeMetricFamily("sluice_odd", 'Odd "values" \\ and such.', labels=("which",))
        for value in (math.inf, -math.inf, math.nan, 0.0, -1.5, 7, True):
            odd.add_metric((str(value),), value)
        unknown = Metric("sluice_unknown", "Unknown.", "unknown")
        unknown.add_sample("sluice_unknown", {}, 1.0)
        return [buckets, bare, counts, odd, unknown, GaugeMetricFamily("sluice_one", "One.", value=1)]


def comparable(family: Metric) -> tuple[object, ...]:
    """Return a family so that equal ones compare equal, whatever the order of their labels, and NaN too."""
    samples = [
        (s.name, sorted(s.labels.items()), repr(float(s.value)), s.timestamp, s.exemplar) for s in family.samples
    ]
    return family.name, family.documentation, family.type, samples


@pytest.mark.parametrize("accept", FORMATS)
def test_the_page_reads_as_the_library_s(accept: str) -> None:
    registry = CollectorRegistry()
    registry.register(Families())
    Counter("sluice_own", "The library's own.", ("model",), registry=registry).labels("a").inc()
    Summary("sluice_lag", "Summary.", registry=registry).observe(0.5)
    write, content_type = choose_writer(accept)
    library, library_type = choose_encoder(accept)
    assert content_type == library_type
    parse = openmetrics.text_string_to_metric_families if "openmetrics" in accept else text_string_to_metric_families
    ours, theirs = (list(parse(page.decode())) for page in (write(registry), library(registry)))
    assert list(map(comparable, ours)) == list(map(comparable, theirs))
    exemplars = [sample.exemplar for family in ours for sample in family.samples if sample.exemplar]
    assert len(exemplars) == (3 if "openmetrics" in accept else 0)
