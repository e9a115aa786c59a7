"""Metrics of quotas: refusals, and how much of each limit is used."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.gateway.tenancy.quotas.account import Account
from sluice.gateway.tenancy.quotas.observer import QuotaObserver, account_levels

_MAX_NAMES = 100
"""Most tenants, and most keys, that labels name: those that came first. Refusals of others count under `other`."""
_OTHER = "other"


class QuotaCollector(Collector):
    """Turns the plain numbers of the observer into families at each scrape, on the event loop's thread."""

    def __init__(self, quotas: QuotaObserver) -> None:
        self._quotas = quotas
        self._named: dict[str, set[str]] = {}

    def collect(self) -> Iterable[Metric]:
        up = GaugeMetricFamily("sluice_quota_store_up", "Whether quotas are counted where they should be: 1 or 0.")
        up.add_metric((), float(not self._quotas.store.problem))
        yield up
        refusals = CounterMetricFamily(
            "sluice_quota_refusals",
            "Requests refused by a limit, of a key or a tenant (scope). Tenants beyond 100 count as other.",
            labels=("limit", "scope", "tenant"),
        )
        counts: dict[tuple[str, str, str], int] = {}
        for (limit, scope, tenant), count in self._quotas.refusals.items():
            label = limit, scope, tenant if self._names("refused", tenant) else _OTHER
            counts[label] = counts.get(label, 0) + count
        for labels, count in counts.items():
            refusals.add_metric(labels, count)
        yield refusals
        yield self._use()

    def _use(self) -> Metric:
        use = GaugeMetricFamily(
            "sluice_quota_used_ratio",
            "Part of a limit that is used, with what open requests have reserved. 100 keys and 100 tenants are shown.",
            labels=("scope", "name", "limit"),
        )
        for account in self._quotas.store.accounts():
            if self._names(account.party.scope, account.party.address):
                for limit, ratio in _ratios(account):
                    use.add_metric((account.party.scope, account.party.name, limit), ratio)
        return use

    def _names(self, kind: str, name: str) -> bool:
        """Whether labels name this one."""
        named = self._named.setdefault(kind, set())
        if len(named) < _MAX_NAMES:
            named.add(name)
        return name in named


def _ratios(account: Account) -> Iterable[tuple[str, float]]:
    for limit, level in account_levels(account).items():
        yield limit, 1 - level.left / level.most if level.most else 1.0
