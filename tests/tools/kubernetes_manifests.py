"""Writes `deploy/kubernetes/`: the manifests of both modes of the chart, for `kubectl apply` without Helm.

Run `python -m tests.tools.kubernetes_manifests` after a change of the chart.
"""

import re

from tests.paths import ROOT
from tests.tools.helm import NOTES, Values, render

FOLDER = ROOT / "deploy" / "kubernetes"
MODES: dict[str, Values] = {
    "single": {},
    "fleet": {
        "mode": "fleet",
        "image": {"tag": "gpu"},
        "model": {"name": "Qwen/Qwen3-8B"},
        "gateway": {"replicas": 2, "imageTag": "cpu"},
        "engine": {
            "gpu": {"count": 1},
            "resources": {"requests": {"cpu": "8", "memory": "32Gi"}, "limits": {"memory": "64Gi"}},
            "sharedMemory": "16Gi",
        },
        "curve": {"existingSecret": "sluice-curve"},
        "redis": {"bundled": {"enabled": True}},
    },
}
HEAD = """\
# Sluice in mode {mode}: kubectl create namespace sluice && kubectl apply -f deploy/kubernetes/{mode}.yaml
#
# `python -m tests.tools.kubernetes_manifests` renders it from deploy/helm/sluice. docs/kubernetes.md explains it.
"""
_OF_HELM = re.compile(r"^ *(?:helm\.sh/chart|app\.kubernetes\.io/managed-by): .*\n", re.MULTILINE)
_HOOKS = "tests/"


def manifests(mode: str) -> str:
    """Return the file of a mode: the chart's manifests without labels and hooks that only Helm understands."""
    rendered = render(MODES[mode], namespace="sluice")
    documents = [
        _OF_HELM.sub("", document).strip()
        for name, text in sorted(rendered.texts.items())
        if name != NOTES and not name.startswith(_HOOKS)
        for document in re.split(r"^---$", text, flags=re.MULTILINE)
    ]
    return "---\n".join([HEAD.format(mode=mode), *(f"{document}\n" for document in documents if document)])


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for mode in MODES:
        (FOLDER / f"{mode}.yaml").write_text(manifests(mode))
