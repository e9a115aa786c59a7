"""The dependencies install what the product imports, or the extra that the importing file belongs to does."""

import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.layers import imports_of, modules
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    "optimum": ("convert", "engine/runners/openvino/convert.py"),
    "dynamo": ("dynamo", "gateway/dynamo"),
    "jwt": ("jwt", "gateway/access/tokens.py"),
    "openai": ("openai", "pipelines/remote"),
    "opentelemetry": ("otel", "gateway/tracing", "gateway/telemetry/otlp.py"),
    "arro3": ("parquet", "cli/usage/tables.py"),
    "psycopg": ("postgres", "gateway/ledger/postgres.py", "pipelines/rag/stores/postgres"),
    "torch": ("torch", "serving/backends/pytorch", "engine/runners/torch"),
    "triton": ("torch", "engine/runners/torch/triton"),
    "ray": ("ray", "cli/fleet"),
    "optuna": ("tune", "tuning/search.py"),
    "cuda": ("tensorrt", "serving/backends/tensorrt"),
    "tensorrt": ("tensorrt", "serving/backends/tensorrt"),
}
"""Top packages that an extra brings: the extra, and the files and folders that may import them."""
RUNTIMES = {"tensorrt_llm", "vllm"}
"""Installed by their own instructions, beside Sluice."""


def closure(texts: Iterable[str]) -> set[str]:
    """Return the names of all distributions that these requirements install here, extras of theirs included."""
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(text), "") for text in texts]
    while waiting:
        needed, extra = waiting.pop()
        if needed.marker is not None and not needed.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(needed.name)
        for each in ("", *needed.extras):
            if (name, each) not in found:
                found.add((name, each))
                try:
                    waiting += [(Requirement(text), each) for text in requires(name) or ()]
                except PackageNotFoundError:
                    continue
    return {name for name, _ in found}


def test_every_import_is_installed_by_the_dependencies_or_by_an_extra() -> None:
    installed = closure(PROJECT["dependencies"])
    distributions = packages_distributions()
    own = {module.partition(".")[0] for module in modules()}
    for module, path in modules().items():
        for top in (
            {target.partition(".")[0] for target in imports_of(path)} - own - RUNTIMES - set(sys.stdlib_module_names)
        ):
            if {canonicalize_name(name) for name in distributions.get(top, ())} & installed:
                continue
            assert top in OPTIONAL, f"{module} imports {top}, which no dependency of pyproject.toml installs"
            extra, *places = OPTIONAL[top]
            assert extra in PROJECT["optional-dependencies"]
            assert any(path.is_relative_to(ROOT / place) for place in places), (
                f"{module} imports {top} of extra {extra}"
            )
