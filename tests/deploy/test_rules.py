"""Recording and alert rules: promtool accepts them, and a test shows that every alert fires."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.gateway.options.config import GROUPS, list_options
from tests.deploy.prometheus import SHIPPED, configured, needs_prometheus, promtool

ROOT = SHIPPED.parents[1]
RULES = sorted([*SHIPPED.glob("recording/*.yml"), *SHIPPED.glob("alerts/*.yml")])
TESTS = sorted(SHIPPED.glob("tests/*.yml"))
SEVERITIES = {"critical", "warning", "info"}


def rules_of(paths: list[Path]) -> Iterator[dict[str, Any]]:
    for path in paths:
        for group in yaml.safe_load(path.read_text())["groups"]:
            yield from group["rules"]


ALERTS = [rule for rule in rules_of(RULES) if "alert" in rule]
ALERT_NAMES = [rule["alert"] for rule in ALERTS]


def shown(state: str) -> set[str]:
    """Return the alerts that a promtool test expects in that state."""
    text = "".join(path.read_text() for path in TESTS)
    return set(re.findall(rf'\{{alertname="(\w+)", alertstate="{state}"', text))


@needs_prometheus
def test_promtool_takes_the_rules() -> None:
    checked = promtool("check", "rules", "--lint-fatal", *RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_prometheus
def test_promtool_takes_the_configuration(tmp_path: Path) -> None:
    """promtool checks that the file of the API key exists."""
    checked = promtool("check", "config", configured(tmp_path, "gateway:8002", ""))
    assert checked.returncode == 0, checked.stdout + checked.stderr


@needs_prometheus
@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_alerts_fire_when_they_should_and_only_then(path: Path) -> None:
    tested = promtool("test", "rules", path)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_alert_is_shown_to_fire_and_to_wait_where_it_should() -> None:
    assert shown("firing") == set(ALERT_NAMES)
    assert shown("pending") == {rule["alert"] for rule in ALERTS if "for" in rule}


def test_the_healthy_server_is_judged_by_every_rule() -> None:
    healthy = yaml.safe_load((SHIPPED / "tests" / "healthy.yml").read_text())
    judged = {(SHIPPED / "tests" / each).resolve() for each in healthy["rule_files"]}
    assert judged == set(RULES)


def test_prometheus_reads_every_rule_file() -> None:
    patterns = yaml.safe_load((SHIPPED / "prometheus.yml").read_text())["rule_files"]
    assert {path for pattern in patterns for path in SHIPPED.glob(pattern)} == set(RULES)


def test_names_of_alerts_are_unique() -> None:
    assert len(set(ALERT_NAMES)) == len(ALERT_NAMES)


@pytest.mark.parametrize("rule", ALERTS, ids=ALERT_NAMES)
def test_an_alert_says_how_bad_it_is_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in SEVERITIES
    notes = rule["annotations"]
    assert notes.keys() == {"summary", "description", "runbook_url"}
    assert notes["runbook_url"] == f"docs/operations.md#{rule['alert'].lower()}"
    assert len(notes["description"].split()) >= 15


def test_options_that_alerts_dashboards_and_images_name_are_options() -> None:
    known = {option.flag for group in GROUPS.values() for _, _, option in list_options(group)}
    for path in (ROOT / "deploy").rglob("*.*"):
        if path.suffix in (".yml", ".py", ".md"):
            named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", path.read_text()))
            assert named <= known, path


def test_the_runbook_has_a_section_for_each_alert() -> None:
    headings = re.findall(r"^#+ (Sluice\w+)$", (ROOT / "docs" / "operations.md").read_text(), re.MULTILINE)
    assert sorted(headings) == sorted(ALERT_NAMES)
