"""The dependencies install what the product imports, or the extra that the importing file belongs to does."""

import sys
import tomllib
from importlib.metadata import packages_distributions

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.layers import imports_of, modules
from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = {
    "PIL": ("images", "pipelines/text/images.py", "load/workload.py", "engine/delegated/tensorrt_llm/images.py"),
    "optimum": ("convert", "engine/runners/openvino/convert.py"),
    "dynamo": ("dynamo", "gateway/dynamo"),
    "fsspec": ("s3", "serving/repository/stores"),
    "httpx2": ("openai", "pipelines/remote"),
    "jsonschema": ("load", "load/answers.py"),
    "jwt": ("jwt", "gateway/tenancy/access/tokens.py"),
    **dict.fromkeys(("markdown_it", "pypdfium2", "selectolax", "webencodings"), ("rag", "pipelines/rag/documents")),
    "openai": ("openai", "pipelines/remote"),
    "opentelemetry": ("otel", "record/otel.py", "gateway/telemetry/otlp.py"),
    "arro3": ("parquet", "cli/usage.py"),
    "psycopg": ("postgres", "state/postgres.py", "gateway/tenancy/ledger/postgres.py", "pipelines/rag/stores/postgres"),
    "torch": ("torch", "serving/backends/pytorch", "engine/runners/torch"),
    "triton": ("torch", "engine/runners/torch/triton"),
    "ray": ("ray", "cli/fleet"),
    "redis": ("redis", "state/redis.py"),
    "optuna": ("tune", "tuning/search.py"),
    "cuda": ("tensorrt", "serving/backends/tensorrt"),
    "tensorrt": ("tensorrt", "serving/backends/tensorrt"),
}
"""Top packages that an extra brings: the extra, and the files and folders that may import them."""
RUNTIMES = {"tensorrt_llm", "vllm"}
"""Installed by their own instructions, beside Sluice."""
HALVES = {"pydantic-core": "pydantic"}
"""Distributions that another one pins to a version of its own, so that naming that one is enough."""


def test_every_import_is_a_named_dependency_or_an_extra_s() -> None:
    """What comes with another package alone may go with its next release."""
    named = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    distributions = packages_distributions()
    own = {module.partition(".")[0] for module in modules()}
    for module, path in modules().items():
        for top in (
            {target.partition(".")[0] for target in imports_of(path)} - own - RUNTIMES - set(sys.stdlib_module_names)
        ):
            found = {canonicalize_name(name) for name in distributions.get(top, ())}
            if {HALVES.get(name, name) for name in found} & named:
                continue
            assert top in OPTIONAL, f"{module} imports {top}, which pyproject.toml does not name"
            extra, *places = OPTIONAL[top]
            assert extra in PROJECT["optional-dependencies"]
            assert any(path.is_relative_to(ROOT / place) for place in places), (
                f"{module} imports {top} of extra {extra}"
            )
