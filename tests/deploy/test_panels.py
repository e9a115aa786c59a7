"""Every query of every dashboard returns data from a real Prometheus that scrapes a busy server."""

import json
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx
import pytest

from deploy.dashboards.__main__ import DASHBOARDS
from deploy.dashboards.layout import dashboard_json
from tests.deploy.gpu_machine import page_with_gpus
from tests.deploy.prometheus import Prometheus, backfill, configured, needs_prometheus, promtool, running_prometheus
from tests.deploy.test_rules import RULES, rules_of
from tests.deploy.traffic import API_KEY, HEADERS, traffic, write_repository
from tests.paths import ROOT
from tests.server_process import ServerProcess, running_bundled

pytestmark = needs_prometheus
HOUR_S = 3600
ONLY_AFTER_TROUBLE = {"sluice_model_load_failures_total", "sluice_response_cache_up"}
"""Metrics that exist only after a failed load, or with a response cache in Redis."""


class PanelQuery(NamedTuple):
    """A query of a panel, with its variables replaced as Grafana replaces them for All."""

    title: str
    promql: str


def filled(promql: str) -> str:
    text = promql.replace("$__rate_interval", "1m")
    return re.sub(r"\$(instance|model)\b", ".*", text)


OTHERS = json.loads((ROOT / "tests/gateway/telemetry/data/alias_queries.json").read_text())
ALIASES = [
    PanelQuery(f"{who}: {name}", name)
    for who, asked in OTHERS.items()
    for name, _ in asked["series"]
    if "lora" not in name  # the server has no adapters
]
QUERIES = [
    PanelQuery(f"{dashboard.uid}: {panel['title']} {target['refId']}", filled(target["expr"]))
    for dashboard in DASHBOARDS
    for panel in dashboard_json(dashboard)["panels"]
    for target in panel.get("targets", ())
]
QUERIES += ALIASES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("server")
    with running_bundled(
        folder / "log",
        str(ROOT / "models" / "rill"),
        "--rag=true",
        f"--rag-store={folder / 'rag.sqlite'}",
        f"--model-repository={write_repository(folder / 'models')}",
        f"--api-key={API_KEY}",
        "--speculation=ngram",
        "--slo=ttft=0.001,e2e=60000",
        "--metrics-aliases=vllm,trtllm,dynamo",
        "--cache-config=local,size=1048576",
        "--metrics-config=summary_latencies=true",
        "--metrics-config=histogram_latencies=true",
        "--allow-gpu-metrics=false",
        "--http-workers=2",
        "--default-limits=requests_per_minute=1000000",
    ) as running:
        running.wait_ready()
        yield running


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run Prometheus with a day of history, which the baseline of latencies needs."""
    folder = tmp_path_factory.mktemp("prometheus")
    data = folder / "data"
    latency = 'job_model:sluice_latency_seconds:p99_5m{{job="sluice",model="{}",latency="{}"}}'
    usual = {latency.format("rill", "time_to_first_token"): 0.05, latency.format("doubled", "inference"): 0.004}
    now = time.time()
    backfill(data, usual, now - 3 * HOUR_S, now - HOUR_S)
    with (
        page_with_gpus(server.metrics_url) as target,
        traffic(server.base_url),
        running_prometheus(configured(folder / "config", target, API_KEY), data) as running,
    ):
        yield running


def test_promtool_finds_nothing_wrong_with_the_page_but_others_names(server: ServerProcess) -> None:
    """Names of Triton and other servers break Prometheus's conventions; dashboards were made for them."""
    page = httpx.get(server.metrics_url, headers=HEADERS).text
    checked = promtool("check", "metrics", input=page)
    complaints = (checked.stdout + checked.stderr).splitlines()
    assert [line for line in complaints if not line.startswith(("nv_", "vllm:", "trtllm_", "dynamo_"))] == []


def test_the_server_is_scraped_with_its_key(prometheus: Prometheus) -> None:
    prometheus.wait(lambda: prometheus.query('up{job="sluice"} == 1') != [], "the server was not scraped")


def test_no_rule_fails_to_evaluate(prometheus: Prometheus) -> None:
    def rules() -> list[dict[str, str]]:
        return [rule for group in prometheus.get("rules")["groups"] for rule in group["rules"]]

    prometheus.wait(lambda: all(rule["health"] != "unknown" for rule in rules()), "rules were not evaluated")
    assert [rule for rule in rules() if rule["health"] != "ok"] == []


@pytest.mark.timeout(200)
def test_every_query_of_a_panel_returns_data(prometheus: Prometheus) -> None:
    empty = [*QUERIES]

    def all_have_data() -> bool:
        empty[:] = [query for query in empty if not prometheus.query(query.promql)]
        return not empty

    prometheus.wait(all_have_data, empty)


def test_rules_ask_for_metrics_that_there_are(prometheus: Prometheus) -> None:
    """promtool's tests make their own series, so they would not detect a misspelt metric."""
    used = {name for rule in rules_of(RULES) for name in names_in(rule["expr"])}
    prometheus.wait(
        lambda: used <= {*prometheus.get("label/__name__/values"), *ONLY_AFTER_TROUBLE},
        f"not all of these are there: {sorted(used)}",
    )
    documented = (ROOT / "docs" / "metrics.md").read_text()
    assert all(f"`{name}`" in documented for name in ONLY_AFTER_TROUBLE)


def names_in(promql: str) -> list[str]:
    """Return the metrics of a query: the names left without labels, values and groupings."""
    bare = re.sub(r"\{[^}]*\}|\b(by|on) \([^)]*\)", "", promql)
    return re.findall(r"\b(?:up\b|(?:sluice|nv|process|job)_[\w:]+)", bare)


def test_the_variables_of_dashboards_have_values(prometheus: Prometheus) -> None:
    for dashboard in DASHBOARDS:
        for variable in dashboard.variables:
            values = prometheus.get(f"label/{variable.label}/values", **{"match[]": variable.metric})
            assert values, variable


def test_failures_under_load_alert(prometheus: Prometheus) -> None:
    """The traffic makes a model fail, and the alert fires."""
    firing = 'ALERTS{alertname="SluiceInferencesFailed", alertstate="firing", model="doubled", reason="BACKEND"}'
    prometheus.wait(lambda: prometheus.query(firing) != [], "the alert does not fire")
