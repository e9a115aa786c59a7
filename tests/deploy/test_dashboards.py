"""The dashboards' JSON: up to date, and valid for Grafana."""

import json
from collections import Counter
from itertools import combinations
from typing import Any

import pytest
import yaml

from deploy.dashboards.__main__ import DASHBOARDS, FOLDER, dashboard_path, dashboard_text
from deploy.dashboards.panels import Dashboard

GRAFANA = FOLDER.parent
PROMETHEUS_ANNOTATION = {"titleFormat", "textFormat", "step"}
"""Fields of an annotation that belong to the Prometheus data source. The schema of dashboards leaves them open."""
by_uid = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda each: each.uid)


def read(dashboard: Dashboard) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(dashboard_path(dashboard).read_text())
    return found


@by_uid
def test_the_json_is_what_the_code_makes(dashboard: Dashboard) -> None:
    """`python -m deploy.dashboards` writes the JSON."""
    assert dashboard_path(dashboard).read_text() == dashboard_text(dashboard)


def test_no_other_dashboard_lies_there() -> None:
    assert set(FOLDER.glob("*.json")) == {dashboard_path(each) for each in DASHBOARDS}
    assert len({each.uid for each in DASHBOARDS}) == len(DASHBOARDS)


@by_uid
def test_panels_are_numbered_and_titled_once(dashboard: Dashboard) -> None:
    panels = read(dashboard)["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert max(Counter(panel["title"] for panel in panels).values()) == 1


@by_uid
def test_panels_do_not_overlap_and_stay_within_24_columns(dashboard: Dashboard) -> None:
    places = [panel["gridPos"] for panel in read(dashboard)["panels"]]
    for place in places:
        assert place["x"] + place["w"] <= 24, place
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        above = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or above, (a, b)


@by_uid
def test_panels_say_what_they_show_and_in_which_unit(dashboard: Dashboard) -> None:
    for panel in read(dashboard)["panels"]:
        if panel["type"] == "row":
            continue
        assert len(panel["description"].split()) >= 3, panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert panel["targets"], panel["title"]


@by_uid
def test_panels_ask_the_data_source_that_is_chosen(dashboard: Dashboard) -> None:
    content = read(dashboard)
    names = [variable["name"] for variable in content["templating"]["list"]]
    assert names[0] == "datasource"
    for panel in content["panels"]:
        for target in panel.get("targets", ()):
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            assert 'instance=~"$instance"' in target["expr"] or 'model=~"$model"' in target["expr"], panel["title"]


@by_uid
def test_grafana_s_own_schema_knows_every_field(dashboard: Dashboard) -> None:
    """Reading by the types that Grafana publishes and writing again loses nothing."""
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard")
    encoder = pytest.importorskip("grafana_foundation_sdk.cog.encoder")
    pytest.importorskip("grafana_foundation_sdk.cog.plugins").register_default_plugins()
    content = read(dashboard)
    again = json.loads(encoder.JSONEncoder(sort_keys=True).encode(models.Dashboard.from_json(content)))
    for annotation in content["annotations"]["list"]:
        for field in PROMETHEUS_ANNOTATION:
            del annotation[field]
    _assert_kept(content, again, dashboard.uid)


def _assert_kept(given: Any, again: Any, where: str) -> None:
    if isinstance(given, dict):
        for name, value in given.items():
            assert name in again, f"{where}.{name}"
            _assert_kept(value, again[name], f"{where}.{name}")
    elif isinstance(given, list):
        assert len(given) == len(again), where
        for index, (one, other) in enumerate(zip(given, again, strict=True)):
            _assert_kept(one, other, f"{where}[{index}]")
    else:
        assert given == again, where


def test_grafana_is_told_where_prometheus_and_the_dashboards_are() -> None:
    [source] = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://prometheus:9090", True)
    config = yaml.safe_load((GRAFANA.parent / "prometheus" / "prometheus.yml").read_text())
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    [provider] = yaml.safe_load((GRAFANA / "provisioning/dashboards/sluice.yml").read_text())["providers"]
    compose = yaml.safe_load((GRAFANA.parents[1] / "docker-compose.yml").read_text())
    mounts = dict(each.split(":")[:2] for each in compose["services"]["grafana"]["volumes"])
    assert mounts["./deploy/grafana/dashboards"] == provider["options"]["path"]
