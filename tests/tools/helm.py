"""Renders and lints the Helm chart with Helm's own library, in a process of its own: the library brings Go's runtime.

`python -m tests.tools.helm` is that process. It reads requests from standard input and writes an answer to each, in
lines of JSON. It ends with the process that started it.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import yaml

from tests.paths import ROOT

CHART = ROOT / "deploy" / "helm" / "sluice"
EXAMPLES = CHART / "examples"
NOTES = "NOTES.txt"
Values = dict[str, Any]
Manifest = dict[str, Any]


class RenderError(ValueError):
    """Helm refuses the values. The text is Helm's."""


@dataclass(frozen=True)
class Rendered:
    """What Helm makes of the chart: the text of each template, and the manifests in all of them."""

    texts: dict[str, str]
    manifests: tuple[Manifest, ...]

    @property
    def notes(self) -> str:
        return self.texts[NOTES]

    def find_all(self, kind: str) -> dict[str, Manifest]:
        """Return the manifests of a kind by their names."""
        return {each["metadata"]["name"]: each for each in self.manifests if each["kind"] == kind}

    def find(self, kind: str, name: str) -> Manifest:
        return self.find_all(kind)[name]


def is_installed() -> bool:
    """Say whether Helm's library is there. It has no wheel for every machine."""
    return find_spec("helm_python") is not None


def example(name: str) -> Values:
    values: Values = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return values


def render(values: Values | None = None, release: str = "sluice", namespace: str = "llm") -> Rendered:
    """Return the manifests of a release with these values. Raises RenderError."""
    answer = _ask(json.dumps({"values": values or {}, "release": release, "namespace": namespace}))
    if "error" in answer:
        raise RenderError(answer["error"])
    texts = {path.partition("/templates/")[2]: text for path, text in answer["texts"].items()}
    documents = (
        each for name, text in texts.items() if name != NOTES for each in yaml.load_all(text, yaml.CSafeLoader)
    )
    return Rendered(texts, tuple(each for each in documents if each is not None))


def lint(values: Values | None = None) -> list[dict[str, Any]]:
    """Return what `helm lint --strict` says: severity (1 information, 2 warning, 3 error), path and error."""
    messages: list[dict[str, Any]] = _ask(json.dumps({"lint": values or {}}))["messages"]
    return messages


@cache
def _ask(request: str) -> dict[str, Any]:
    process = _start_process()
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(f"{request}\n")
    process.stdin.flush()
    answer: dict[str, Any] = json.loads(process.stdout.readline())
    return answer


@cache
def _start_process() -> subprocess.Popen[str]:
    """Start Helm's process at the first call, for all requests."""
    words = [sys.executable, "-m", "tests.tools.helm"]
    return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    import helm_python as helm

    if "lint" in request:
        report: dict[str, Any] = helm.lint(CHART, request["lint"], strict=True, namespace="llm")
        return report
    with helm.Chart.load(CHART) as chart:
        try:
            chart.validate_schema(request["values"])
            texts = chart.render(request["values"], name=request["release"], namespace=request["namespace"])
        except helm.HelmError as error:
            return {"error": str(error)}
    return {"texts": texts}


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(_answer(json.loads(line)))}\n")
        sys.stdout.flush()
