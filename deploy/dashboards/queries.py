"""PromQL queries by model."""

from deploy.dashboards.panels import Query

OF = 'instance=~"$instance", model=~"$model"'
HERE = 'instance=~"$instance"'
FAILED = 'outcome=~"internal|unknown|unavailable|overloaded|deadline"'
MET = ', result="met"'
RATE = "$__rate_interval"
_PERCENTILES = (0.5, 0.9, 0.99)


def rate(metric: str, by: str = "model", also: str = "") -> str:
    return f"sum by ({by}) (rate({metric}{{{OF}{also}}}[{RATE}]))"


def total(metric: str) -> str:
    return f"sum by (model) ({metric}{{{OF}}})"


def percentiles(histogram: str) -> tuple[Query, ...]:
    buckets = f"sum by (model, le) (rate({histogram}_bucket{{{OF}}}[{RATE}]))"
    return tuple(Query(f"histogram_quantile({q}, {buckets})", f"{{{{model}}}} p{q * 100:g}") for q in _PERCENTILES)


def quantile(q: float, histogram: str) -> str:
    return f"histogram_quantile({q}, {rate(f'{histogram}_bucket', 'model, le')})"


def lengths(histogram: str, name: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, histogram), f"{{{{model}}}} {name} p{q * 100:g}") for q in (0.5, 0.9))


def sizes(histogram: str, name: str) -> tuple[Query, ...]:
    return tuple(Query(quantile(q, histogram), f"{{{{model}}}} {name} p{q * 100:g}") for q in (0.5, 0.99))


def ratio(above: str, *below: str) -> str:
    return f"{rate(above)} / ({' + '.join(rate(each) for each in below)} > 0)"
