"""The parts of others' custom resources that the chart uses, as schemas that allow no other field.

They were read from the definitions of these commits, against which the chart's objects were validated whole too:

- ServiceMonitor, PodMonitor: prometheus-operator 6adcebc50, example/prometheus-operator-crd/
- ScaledObject: kedacore/keda 8b4f083ca, config/crd/bases/keda.sh_scaledobjects.yaml
- LeaderWorkerSet: kubernetes-sigs/lws 060ab4da1, config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml
- InferencePool: kubernetes-sigs/gateway-api-inference-extension 84436a96,
  config/crd/bases/inference.networking.k8s.io_inferencepools.yaml
"""

from typing import Any

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string", "minLength": 1}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_PORT: Schema = {"type": "integer", "minimum": 1, "maximum": 65535}
_DURATION: Schema = {"type": "string", "pattern": r"^\d+(ms|s|m|h)$"}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    properties = {**required, **(optional or {})}
    return {
        "type": "object",
        "required": list(required),
        "properties": properties,
        "additionalProperties": False,
    }


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": item}


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    names = {"apiVersion": {"const": api_version}, "kind": {"const": kind}}
    return _object({**names, "metadata": {"type": "object"}, "spec": spec})


_LABELS: Schema = {"type": "object", "additionalProperties": {"type": "string"}, "minProperties": 1}
_SELECTOR = _object({"matchLabels": _LABELS})
_KEY_OF_SECRET = _object({"name": _TEXT, "key": _TEXT})
_AUTHORIZATION = _object({"credentials": _KEY_OF_SECRET}, {"type": {"enum": ["Bearer"]}})
_ENDPOINT = _object({"port": _TEXT}, {"path": _TEXT, "interval": _DURATION, "authorization": _AUTHORIZATION})
_POLICY = _object({"type": {"enum": ["Pods", "Percent"]}, "value": _PORT, "periodSeconds": _COUNT})
_SCALING = _object({"stabilizationWindowSeconds": _COUNT, "policies": _list_of(_POLICY)})
_BEHAVIOR = _object({"behavior": _object({"scaleDown": _SCALING})})
_QUERY = _object(
    {"serverAddress": _TEXT, "query": _TEXT, "threshold": {"type": "string", "pattern": r"^[\d.]+$"}},
    {"ignoreNullValues": {"enum": ["true", "false"]}},
)
_TRIGGER = _object(
    {"type": {"const": "prometheus"}, "metadata": _QUERY}, {"metricType": {"enum": ["AverageValue", "Value"]}}
)
_POD_TEMPLATE = _object({"metadata": {"type": "object"}, "spec": {"type": "object"}})
_ROLLOUT = _object({"maxUnavailable": _COUNT, "maxSurge": _COUNT})

SCHEMAS: dict[str, Schema] = {
    "ServiceMonitor": _resource(
        "monitoring.coreos.com/v1", "ServiceMonitor", _object({"selector": _SELECTOR, "endpoints": _list_of(_ENDPOINT)})
    ),
    "PodMonitor": _resource(
        "monitoring.coreos.com/v1",
        "PodMonitor",
        _object({"selector": _SELECTOR, "podMetricsEndpoints": _list_of(_ENDPOINT)}),
    ),
    "ScaledObject": _resource(
        "keda.sh/v1alpha1",
        "ScaledObject",
        _object(
            {
                "scaleTargetRef": _object({"apiVersion": _TEXT, "kind": _TEXT, "name": _TEXT}),
                "triggers": _list_of(_TRIGGER),
            },
            {
                "pollingInterval": _COUNT,
                "cooldownPeriod": _COUNT,
                "minReplicaCount": _COUNT,
                "maxReplicaCount": _COUNT,
                "advanced": _object({"horizontalPodAutoscalerConfig": _BEHAVIOR}),
            },
        ),
    ),
    "LeaderWorkerSet": _resource(
        "leaderworkerset.x-k8s.io/v1",
        "LeaderWorkerSet",
        _object(
            {
                "leaderWorkerTemplate": _object(
                    {"workerTemplate": _POD_TEMPLATE},
                    {
                        "leaderTemplate": _POD_TEMPLATE,
                        "size": _PORT,
                        "restartPolicy": {"enum": ["None", "RecreateGroupOnPodRestart"]},
                    },
                )
            },
            {
                "replicas": _COUNT,
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": _object(
                    {"type": {"const": "RollingUpdate"}}, {"rollingUpdateConfiguration": _ROLLOUT}
                ),
            },
        ),
    ),
    "InferencePool": _resource(
        "inference.networking.k8s.io/v1",
        "InferencePool",
        _object(
            {
                "selector": _SELECTOR,
                "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": _object({"number": _PORT})},
                "endpointPickerRef": _object(
                    {"name": _TEXT},
                    {"port": _object({"number": _PORT}), "failureMode": {"enum": ["FailOpen", "FailClose"]}},
                ),
            }
        ),
    ),
}
"""Schemas by kind."""
