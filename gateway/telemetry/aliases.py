"""Shows our metrics under the names of other servers too."""

from collections.abc import Collection, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from sluice.gateway.telemetry.alias_table import TABLE, Alias, Families, Scheme
from sluice.gateway.telemetry.buckets import BucketFamily

ALIAS_NAMES = frozenset(alias.name for _, rows in TABLE.values() for alias in rows)
"""Names of the aliases, whether or not they are shown."""
_MODEL = "model"


class AliasedRegistry(CollectorRegistry):
    """A registry with aliases of its families. It may be that of a server with several processes, whose sums it then
    derives them from."""

    def __init__(self, own: CollectorRegistry, servers: Collection[str]) -> None:
        super().__init__()
        self._own = own
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for metric in self._own.collect():
            families[metric.name] = metric
            yield metric
        for server in self._servers:
            scheme, rows = TABLE[server]
            for alias in rows:
                yield alias_family(alias, scheme, families)


def alias_family(alias: Alias, scheme: Scheme, families: Families) -> Metric:
    """Return an alias with the values that `families` have now; without samples where they have none."""
    text = f"The same as {alias.source}" if alias.read is None else f"From {alias.source}"
    if alias.read is None:
        return _histogram(alias, scheme, text, families.get(alias.source))
    made = Metric(alias.name, text, alias.kind)
    sample_name = f"{alias.name}_total" if alias.kind == "counter" else alias.name
    for labels, value in alias.read(families):
        if _MODEL in labels:
            labels = {
                scheme.model: labels[_MODEL],
                **{k: v for k, v in labels.items() if k != _MODEL},
                **scheme.constants,
            }
        made.add_sample(sample_name, labels, value)
    return made


def _histogram(alias: Alias, scheme: Scheme, text: str, source: Metric | None) -> Metric:
    if isinstance(source, BucketFamily):
        names = (scheme.model, *scheme.constants)
        return source.renamed(alias.name, text, names, tuple(scheme.constants.values()))
    made = Metric(alias.name, text, "histogram")
    for sample in () if source is None else source.samples:  # sums of several processes
        labels = {scheme.model if name == _MODEL else name: value for name, value in sample.labels.items()}
        name = alias.name + sample.name.removeprefix(alias.source)
        made.add_sample(name, {**labels, **scheme.constants}, sample.value, sample.timestamp, sample.exemplar)
    return made
