"""Releases of the chart that tests render: the defaults, each example, and values that turn on all the rest."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from tests.tools.helm import EXAMPLES, Manifest, Rendered, Values, example, is_installed, render

needs_helm = pytest.mark.skipif(not is_installed(), reason="helm-python-sdk has no wheel for this machine")
_SPREAD = {
    "maxSkew": 1,
    "topologyKey": "topology.kubernetes.io/zone",
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/name": "sluice"}},
}
_ZONE = {
    "nodeAffinity": {
        "requiredDuringSchedulingIgnoredDuringExecution": {
            "nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": ["a"]}]}]
        }
    }
}
_PLACED: Values = {
    "nodeSelector": {"disk": "ssd"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
    "affinity": _ZONE,
    "topologySpreadConstraints": [_SPREAD],
    "podAnnotations": {"example.com/team": "llm"},
    "podLabels": {"team": "llm"},
    "priorityClassName": "serving",
}
_FILLED: Values = {
    "name": "/models/qwen3",
    "servedName": "qwen3",
    "volume": {
        "init": {
            "image": "example.com/loader:1.0.0",
            "command": ["load"],
            "args": ["/models"],
            "env": [{"name": "SOURCE", "value": "s3://models/qwen3"}],
        }
    },
}
_ALL: Values = {
    "imagePullSecrets": [{"name": "registry"}],
    "model": _FILLED,
    "gateway": {**_PLACED, "replicas": 2, "args": ["--max-queue-size=256"], "env": [{"name": "TZ", "value": "UTC"}]},
    "engine": {
        **_PLACED,
        "resources": {"limits": {"cpu": "3500m", "memory": "8Gi"}},
        "args": ["--max-num-seqs=32"],
        "env": [{"name": "CUDA_DEVICE_ORDER", "value": "PCI_BUS_ID"}],
    },
    "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}, "httpPort": 80},
    "ingress": {
        "enabled": True,
        "className": "nginx",
        "host": "llm.example.com",
        "annotations": {"nginx.ingress.kubernetes.io/proxy-read-timeout": "60"},
    },
    "auth": {"apiKey": 'a "key": 1'},
    "huggingFace": {"token": "hf_token"},
    "persistence": {"cache": {"enabled": True, "storageClass": "fast"}},
    "autoscaling": {"provider": "hpa"},
    "monitoring": {"enabled": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"clientsFrom": [{"namespaceSelector": {"matchLabels": {"team": "llm"}}}]},
    "serviceAccount": {"annotations": {"example.com/role": "reader"}},
}
VALUES: dict[str, Values] = {
    "defaults": {},
    **{path.stem: example(path.stem) for path in sorted(EXAMPLES.glob("*.yaml"))},
    "all-single": _ALL,
    "all-fleet": _ALL
    | {
        "mode": "fleet",
        "curve": {"existingSecret": "sluice-curve"},
        "redis": {"url": "redis://:secret@redis.example.com:6380/2", "use": {"responses": True, "keys": True}},
    },
    "plain-fleet": {
        "mode": "fleet",
        "model": {"name": "Qwen/Qwen3-0.6B"},
        "curve": {"enabled": False},
        "serviceAccount": {"create": False, "name": "existing"},
        "podDisruptionBudget": {"enabled": False},
    },
    "time-slicing": {
        "model": {"volume": {"hostPath": "/srv/models"}, "name": "/models/a"},
        "engine": {"gpu": {"count": 1, "sharing": "time-slicing", "kvCacheMemory": "4G"}},
        "persistence": {"data": {"existingClaim": "documents"}},
        "networkPolicy": {"enabled": False},
    },
}
"""Sets of values by name."""
each_release = pytest.mark.parametrize("name", VALUES)


@cache
def release(name: str) -> Rendered:
    """Return one that tests share, and leave as it is."""
    return render(VALUES[name])


def pods(rendered: Rendered) -> Iterator[tuple[str, Manifest]]:
    """Yield the name of each workload and the template of its pods, which has metadata and specification."""
    for each in rendered.manifests:
        name = each["metadata"]["name"]
        if each["kind"] in ("Deployment", "StatefulSet"):
            yield name, each["spec"]["template"]
        elif each["kind"] == "LeaderWorkerSet":
            template = each["spec"]["leaderWorkerTemplate"]
            yield f"{name} leader", template["leaderTemplate"]
            yield f"{name} worker", template["workerTemplate"]
        elif each["kind"] == "Pod":
            yield name, {"metadata": each["metadata"], "spec": each["spec"]}


def containers(rendered: Rendered) -> Iterator[tuple[Manifest, Manifest]]:
    """Yield each container and the specification of its pod."""
    for _, pod in pods(rendered):
        for container in (*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]):
            yield container, pod["spec"]


def container(rendered: Rendered, name: str) -> Any:
    """Return the container of this name."""
    [found] = (each for each, _ in containers(rendered) if each["name"] == name)
    return found
