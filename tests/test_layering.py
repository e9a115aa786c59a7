"""Imports point down: gateway -> pipelines -> engine, and inside engine from loop to types."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALLOWED: dict[str, set[str]] = {
    "engine": set(),
    "pipelines": {"engine"},
    "gateway": {"engine", "pipelines"},
    "load": set(),
}
FOREIGN_TO_ENGINE = {"fastapi", "starlette", "pydantic", "uvicorn", "grpc", "transformers", "tokenizers"}
RUNTIMES = {
    "tensorrt_llm": ("engine/tensorrt_llm",),
    "openvino": ("engine/runners/openvino", "pipelines/backends/openvino", "pipelines/backends/tensorflow"),
    "torch": ("engine/runners/torch_", "pipelines/backends/pytorch"),
    "tensorrt": ("pipelines/backends/tensorrt",),
    "onnxruntime": ("pipelines/backends/onnxruntime",),
}


def imports_of(path: Path) -> Iterator[str]:
    """Every module that a file names in an import, wherever in it; relative ones are not used here."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def is_in(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


@pytest.mark.parametrize("package", ALLOWED)
def test_packages_import_only_what_lies_below(package: str) -> None:
    forbidden = ALLOWED.keys() - ALLOWED[package] - {package}
    assert modules(package)
    for path in modules(package):
        for target in imports_of(path):
            assert target.partition(".")[0] not in forbidden, f"{path} imports {target}"


@pytest.mark.parametrize(("one", "other"), [("http", "grpc"), ("grpc", "http")])
def test_protocols_do_not_know_each_other(one: str, other: str) -> None:
    for path in modules(f"gateway/{one}"):
        for target in imports_of(path):
            assert not is_in(target, f"gateway.{other}"), f"{path} imports {target}"


@pytest.mark.parametrize(("one", "other"), [("openai", "v2"), ("v2", "openai")])
def test_http_protocols_do_not_know_each_other(one: str, other: str) -> None:
    for path in modules(f"gateway/http/{one}"):
        for target in imports_of(path):
            assert not is_in(target, f"gateway.http.{other}"), f"{path} imports {target}"


def test_the_engine_knows_no_text_and_no_http() -> None:
    for path in modules("engine"):
        for target in imports_of(path):
            assert target.partition(".")[0] not in FOREIGN_TO_ENGINE, f"{path} imports {target}"


@pytest.mark.parametrize("runtime", RUNTIMES)
def test_a_runtime_is_imported_only_in_its_own_folder(runtime: str) -> None:
    for package in ALLOWED:
        for path in modules(package):
            if not any(path.is_relative_to(ROOT / folder) for folder in RUNTIMES[runtime]):
                assert not any(is_in(target, runtime) for target in imports_of(path)), f"{path} imports {runtime}"


WITHOUT_THE_OTHERS = """
import sys

class Others:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {"engine", "numpy", "msgspec", "zmq", "packaging", *sys.stdlib_module_names}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Others())
import engine.tensorrt_llm.process
"""


def test_an_engine_under_another_python_needs_little() -> None:
    """What docs/tensorrt-llm.md has installed into TensorRT-LLM's environment, which has numpy."""
    subprocess.run([sys.executable, "-c", WITHOUT_THE_OTHERS], cwd=ROOT, check=True, timeout=60)


def test_the_planner_is_pure() -> None:
    forbidden = {"asyncio", "logging", "time", "threading", "random", "os", "zmq"}
    for name in ("scheduling/planner.py", "scheduling/policies.py"):
        used = {target.partition(".")[0] for target in imports_of(ROOT / "engine" / name)}
        assert not used & forbidden


def test_packages_have_no_cycles() -> None:
    """Modules of one package may be sorted so that each imports only earlier ones."""
    files = {path: module_name(path) for package in ALLOWED for path in modules(package)}
    names = set(files.values())
    edges = {name: set(runtime_imports(path)) & names - {name} for path, name in files.items()}
    while edges:
        leaves = {name for name, targets in edges.items() if not targets & edges.keys()}
        assert leaves, f"cycle among {sorted(edges)}"
        edges = {name: targets for name, targets in edges.items() if name not in leaves}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def runtime_imports(path: Path) -> Iterator[str]:
    """Imports at the top of the module: those under TYPE_CHECKING or in functions make no cycle."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
