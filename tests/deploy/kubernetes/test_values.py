"""values.yaml and values.schema.json: each value has its type, and what contradicts is refused with a reason."""

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from tests.deploy.kubernetes.releases import VALUES, needs_helm, release
from tests.tools.helm import CHART, RenderError, Values, render

pytestmark = needs_helm
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: Values = yaml.safe_load((CHART / "values.yaml").read_text())
FLEET: Values = {"mode": "fleet", "model": {"name": "a"}, "curve": {"existingSecret": "keys"}}
OF_HELM = {"global"}


def undescribed(values: Values, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of values without a schema, and of objects that would take any name."""
    for name, value in values.items():
        here = f"{path}.{name}".lstrip(".")
        known = schema.get("properties", {}).get(name)
        if known is None:
            yield here
        elif isinstance(value, dict) and value and "properties" in known:
            if known.get("additionalProperties") is not False:
                yield here
            yield from undescribed(value, known, here)


def unknown(values: Values, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Yield the paths of properties that values.yaml lacks."""
    for name, known in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        if name not in values:
            if here not in OF_HELM:
                yield here
        elif isinstance(values[name], dict) and values[name]:
            yield from unknown(values[name], known, here)


def test_the_schema_is_one_and_the_defaults_keep_to_it() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(DEFAULTS)


def test_values_and_schema_have_the_same_names() -> None:
    assert list(undescribed(DEFAULTS, SCHEMA)) == []
    assert [path for path in unknown(DEFAULTS, SCHEMA) if "resources" not in path] == []


@pytest.mark.parametrize("name", VALUES)
def test_values_of_tests_keep_to_the_schema(name: str) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES[name])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"replicas": 2}, "'replicas' not allowed"),
        ({"engine": {"gpus": 2}}, "'gpus' not allowed"),
        ({"mode": "cluster"}, "'single', 'fleet'"),
        ({"engine": {"gpu": {"count": "2"}}}, "/engine/gpu/count"),
        ({"engine": {"sharedMemory": "16 GB"}}, "/engine/sharedMemory"),
        ({"service": {"httpPort": 0}}, "/service/httpPort"),
        ({"redis": {"url": "localhost:6379"}}, "/redis/url"),
        ({"mode": "fleet"}, "model.name is empty"),
        ({"mode": "fleet", "model": {"name": "a"}}, "curve.existingSecret is empty"),
        (FLEET | {"curve": {"enabled": False}, "networkPolicy": {"enabled": False}}, "any pod could use the engines"),
        (FLEET | {"persistence": {"data": {"enabled": True}}}, "persistence.data is for mode single"),
        (FLEET | {"inferencePool": {"enabled": True}}, "inferencePool.enabled is for mode single"),
        (FLEET | {"engine": {"nodesPerReplica": 2}}, "engine.workerCommand is empty"),
        (
            FLEET
            | {
                "engine": {"nodesPerReplica": 2, "workerCommand": ["ray"]},
                "persistence": {"cache": {"enabled": True}},
            },
            "give persistence.cache.existingClaim",
        ),
        ({"engine": {"nodesPerReplica": 2}}, "need mode fleet"),
        (
            {"gateway": {"replicas": 2}, "persistence": {"data": {"enabled": True}}},
            "persistence.data is for one replica",
        ),
        ({"autoscaling": {"provider": "hpa"}, "persistence": {"data": {"existingClaim": "a"}}}, "for one replica"),
        ({"engine": {"gpu": {"count": 1, "sharing": "mps"}}}, "engine.gpu.kvCacheMemory is empty"),
        ({"engine": {"gpu": {"count": 2, "sharing": "mps", "kvCacheMemory": "4G"}}}, "one share of a GPU"),
        ({"redis": {"url": "redis://a:6379", "bundled": {"enabled": True}}}, "choose one"),
        ({"redis": {"bundled": {"enabled": True}, "use": {"keys": True}}}, "the bundled one forgets"),
        ({"inferencePool": {"enabled": True}}, "inferencePool.endpointPicker.name is empty"),
        ({"ingress": {"enabled": True}}, "ingress.host is empty"),
        ({"autoscaling": {"minReplicas": 5}}, "autoscaling.minReplicas is above"),
        (FLEET | {"autoscaling": {"provider": "hpa", "minReplicas": 0}}, "only keda starts a first replica"),
        ({"autoscaling": {"provider": "keda", "minReplicas": 0}}, "set mode to fleet"),
    ],
)
def test_what_cannot_be_is_refused_with_a_reason(values: Values, reason: str) -> None:
    with pytest.raises(RenderError) as refused:
        render(values)
    assert reason in str(refused.value)


def test_keda_may_end_the_last_engine_and_gateways_hold_requests_then() -> None:
    rendered = render(FLEET | {"autoscaling": {"provider": "keda", "minReplicas": 0, "wakeTimeoutSeconds": 90}})
    [scaler] = rendered.find_all("ScaledObject").values()
    assert (scaler["spec"]["minReplicaCount"], scaler["spec"]["cooldownPeriod"]) == (0, 300)
    for least, is_held in ((0, True), (1, False)):
        rendered = render(FLEET | {"autoscaling": {"provider": "keda", "minReplicas": least, "wakeTimeoutSeconds": 90}})
        [gateway] = rendered.find_all("Deployment").values()
        arguments = gateway["spec"]["template"]["spec"]["containers"][0]["args"]
        assert ("--wake-timeout-secs=90" in arguments) is is_held


def test_notes_say_what_is_open() -> None:
    assert "No API key is set" in release("defaults").notes
    assert "No API key is set" not in release("gpu").notes
    assert "only the NetworkPolicy" in release("plain-fleet").notes
    assert "Several gateways without Redis" not in release("fleet").notes
    assert "Several gateways without Redis" in render(FLEET | {"gateway": {"replicas": 2}}).notes
