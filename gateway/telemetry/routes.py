"""Metrics of routes and of the answer cache."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.pipelines.answers.cache import AnswerCache
from sluice.pipelines.routes.route import Route


class RouteCollector(Collector):
    """Turns plain numbers into families at each scrape, on the event loop's thread. Labels are names in the file of
    routes and of loaded models, and codes of errors: clients can add none."""

    def __init__(self, routes: Iterable[Route], answers: AnswerCache | None) -> None:
        self._routes = routes
        self._answers = answers

    def collect(self) -> Iterable[Metric]:
        """Return the families; none of what the server does not have."""
        routes = list(self._routes)
        if routes:
            yield from _route_families(routes)
        if self._answers is not None:
            yield from _answer_families(self._answers)


def _route_families(routes: list[Route]) -> Iterable[Metric]:
    requests = CounterMetricFamily(
        "sluice_route_requests",
        "Attempts to have an answer from a target of a route, by how they ended: ok, cancelled, or an error code.",
        labels=("route", "target", "outcome"),
    )
    states = GaugeMetricFamily(
        "sluice_route_breaker_state",
        "A target's circuit breaker: 0 closed, 1 half open, 2 open, when the target is passed over.",
        labels=("route", "target"),
    )
    hedges = CounterMetricFamily(
        "sluice_route_hedges",
        "Requests of which a second target was asked, as the first was silent, by whether it answered first (won).",
        labels=("route", "outcome"),
    )
    for route in routes:
        for target in route.targets:
            states.add_metric((route.name, target.name), target.breaker.state)
            for outcome, count in target.outcomes.items():
                requests.add_metric((route.name, target.name, outcome), count)
        hedges.add_metric((route.name, "won"), route.num_hedges_won)
        hedges.add_metric((route.name, "lost"), route.num_hedges_lost)
    return requests, states, hedges


def _answer_families(answers: AnswerCache) -> Iterable[Metric]:
    lookups = CounterMetricFamily(
        "sluice_answer_cache_lookups",
        "Answers that were looked for in the response cache, by whether it had them: hit or miss.",
        labels=("model", "outcome"),
    )
    kept = CounterMetricFamily(
        "sluice_answer_cache_kept_bytes",
        "Bytes of the answers that were kept, whether or not they still are.",
        labels=("model",),
    )
    for model, counts in answers.counts.items():
        lookups.add_metric((model, "hit"), counts.num_hits)
        lookups.add_metric((model, "miss"), counts.num_misses)
        kept.add_metric((model,), counts.kept_bytes)
    return lookups, kept
