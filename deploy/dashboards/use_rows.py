"""Rows about who uses the server: quotas, the ledger, and the gateway processes that answer."""

from deploy.dashboards.panels import Panel, Query, Row, Unit, warns
from deploy.dashboards.queries import HERE, RATE

USE = Row(
    "Use",
    (
        Panel(
            "Quotas used",
            "Share of each limit that is used, with what open requests have reserved: the ten fullest. At 100 % "
            "requests are refused.",
            (
                Query(
                    f"topk(10, max by (scope, name, limit) (sluice_quota_used_ratio{{{HERE}}}))",
                    "{{scope}} {{name}} {{limit}}",
                ),
            ),
            Unit.SHARE,
            width=8,
            thresholds=warns(0.8, 1),
        ),
        Panel(
            "Requests refused by quotas",
            "Requests per second that a limit of a key or tenant refused.",
            (
                Query(
                    f"sum by (scope, tenant, limit) (rate(sluice_quota_refusals_total{{{HERE}}}[{RATE}])) or vector(0)",
                    "{{tenant}} {{scope}} {{limit}}",
                ),
            ),
            Unit.PER_SECOND,
            width=6,
        ),
        Panel(
            "Ledger",
            "Rows of the ledger written per second, and rows that wait. Waiting rows that grow mean that its place "
            "cannot be used.",
            (
                Query(f"sum(rate(sluice_ledger_rows_total{{{HERE}}}[{RATE}]))", "written per second"),
                Query(f"sum(sluice_ledger_waiting_rows{{{HERE}}})", "waiting"),
            ),
            Unit.SHORT,
            width=5,
        ),
        Panel(
            "HTTP workers",
            "Gateway processes that serve, with --http-workers, and those that crashed or hung within the hour.",
            (
                Query(f"sum(sluice_http_workers{{{HERE}}})", "serving"),
                Query(f"sum(increase(sluice_http_worker_losses_total{{{HERE}}}[1h]))", "lost"),
            ),
            Unit.COUNT,
            width=5,
        ),
    ),
)
