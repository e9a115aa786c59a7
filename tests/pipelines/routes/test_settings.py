"""The file of routes: what it may have, and what is said of what it may not."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice.pipelines.routes.route import Route
from sluice.pipelines.routes.settings import TargetChoice, parse_routes, read_routes
from tests.paths import DOCS


def route(**fields: Any) -> dict[str, Any]:
    return {"routes": {"fast": {"targets": [{"model": "a"}, {"model": "b"}], **fields}}}


def test_every_field_is_read(tmp_path: Path) -> None:
    path = tmp_path / "routes.yaml"
    fields = {
        "targets": [{"model": "a", "weight": 3}, {"model": "b:c", "timeout_s": 2}],
        "choose": "weighted",
        "retries": 4,
        "retry_delay_ms": 10,
        "hedge_after_ms": 300,
        "hedge_max_tokens": 32,
        "cache": "shared",
        "breaker": {"failures": 3, "failure_rate": 0.4, "window": 10, "open_s": 1, "max_open_s": 9},
        "description": "for the website",
    }
    path.write_text(yaml.safe_dump({"routes": {"fast": fields}}))
    found = read_routes(str(path))["fast"]
    assert [(each.model, each.weight, each.timeout_s) for each in found.targets] == [("a", 3, None), ("b:c", 1, 2)]
    assert (found.choose, found.num_attempts, found.cache) == (TargetChoice.WEIGHTED, 5, "shared")
    assert (found.hedge_after_ms, found.hedge_max_tokens, found.breaker.failures) == (300, 32, 3)
    assert parse_routes(route())["fast"].num_attempts == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "the file must have one field, routes: {NAME: {targets: ...}}, got None"),
        ({"routes": {}}, "routes must have from 1 to 256 names, got 0"),
        ({"routes": {3: {}}}, "a name must be a text of 1 to 256 printable characters without a comma, got 3"),
        ({"routes": {"a": {}}}, "route 'a': its fields: object missing required field `targets`, got {}"),
        ({"routes": {"a": {"targets": []}}}, "route 'a': targets must be from 1 to 32 models, got 0"),
        (
            {"routes": {"a": {"targets": [{"model": "a"}]}}},
            "route 'a': targets[0].model must be a model, got the route itself: a -> a",
        ),
        (
            {"routes": {"a": {"targets": [{"model": "b"}]}, "b": {"targets": [{"model": "a"}]}}},
            "route 'a': targets[0].model must be a model, got the route 'b': a route's targets are no routes",
        ),
        (
            route(targets=[{"model": "a"}, {"model": "a"}]),
            "route 'fast': targets[1].model must be a model that no target before it has, got 'a' again",
        ),
        (
            route(targets=[{"model": "a", "weigth": 2}]),
            "route 'fast': targets[0]: object contains unknown field `weigth`, got {'model': 'a', 'weigth': 2}",
        ),
        (
            route(targets=[{"model": "a", "weight": "x"}]),
            "route 'fast': targets[0].weight: expected `float`, got `str`, got 'x'",
        ),
        (route(targets=[{"model": "a", "timeout_s": 0}]), "route 'fast': targets[0].timeout_s must be from 0.001"),
        (route(choose="best"), "route 'fast': choose must be ordered or weighted, got 'best'"),
        (route(cache="mine"), "route 'fast': cache must be true, false or shared, got 'mine'"),
        (route(retries=-1), "route 'fast': retries must be from 0 to 100, got -1"),
        (route(retries=float("nan")), "route 'fast': retries: expected `int | null`, got `float`, got nan"),
        (
            route(breaker={"open_s": 10, "max_open_s": 5}),
            "route 'fast': breaker.max_open_s must be at least open_s (10), got 5",
        ),
        (route(breaker={"failure_rate": 2}), "route 'fast': breaker.failure_rate must be from 0.01 to 1, got 2"),
        (
            route(choose="weighted", targets=[{"model": "a", "weight": 0}]),
            "route 'fast': targets must have a weight above 0, got 0 for each, with choose: weighted",
        ),
    ],
)
def test_a_mistake_names_route_field_and_value(content: object, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_routes(content)
    assert str(caught.value).startswith(message)


def test_a_mistake_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "routes.yaml"
    with pytest.raises(ValueError, match=f"--routes {path} cannot be read: .*No such file"):
        read_routes(str(path))
    path.write_text("routes: [")
    with pytest.raises(ValueError, match=f"--routes {path} cannot be read: while parsing"):
        read_routes(str(path))
    path.write_text("routes: {a: 3}")
    with pytest.raises(ValueError, match=f"--routes {path}: route 'a': its fields: expected `object`, got `int`"):
        read_routes(str(path))


def test_the_example_of_the_documentation_is_one() -> None:
    [example] = re.findall(r"```yaml\n(.*?)```", (DOCS / "routes.md").read_text(), re.DOTALL)
    found = parse_routes(yaml.safe_load(example))
    assert list(found) == ["assistant", "experiment", "search-vectors"]
    assert (found["assistant"].num_attempts, found["experiment"].choose) == (4, TargetChoice.WEIGHTED)


def test_weights_order_all_targets_by_chance() -> None:
    content = route(choose="weighted", targets=[{"model": "a", "weight": 8}, {"model": "b"}, {"model": "c"}])
    found = Route("fast", parse_routes(content)["fast"], lambda model, adapter: None)
    orders = [[each.name for each in found.order(f"key {number}")] for number in range(2000)]
    assert orders == [[each.name for each in found.order(f"key {number}")] for number in range(2000)]
    assert all(sorted(each) == ["a", "b", "c"] for each in orders)
    first_a = sum(each[0] == "a" for each in orders)
    assert 1500 < first_a < 1700  # 1600 are expected; the keys are fixed, so this cannot change by chance
    second_after_a = [each[1] for each in orders if each[0] == "a"]
    assert 0.45 < second_after_a.count("b") / len(second_after_a) < 0.55
