"""Every arrow points down: rooms stand on the floors of one tower, and a room imports only what stands below it.

A room is a folder with a subject, or one file that stands apart from its folder. Imports inside functions and those for
the type checker alone count too: they tie two rooms as any other.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import ROOT

PACKAGES = ("sluice", "engine", "serving", "pipelines", "gateway", "cli", "load")
TOWER = (
    "sluice",
    "engine",
    "engine.runners",
    "engine.runners.openvino",
    "engine.sampling",
    "engine.guidance",
    "engine.sequence",
    "engine.forecast",
    "engine.scheduling",
    "engine.kv",
    "engine.speculation",
    "engine.loop",
    "engine.process",
    "engine.delegated",
    "engine.delegated.tensorrt_llm",
    "engine.runtimes",
    "engine.client",
    "serving.tensors",
    "serving",
    "serving.caching",
    "serving.batching",
    "serving.backend",
    "serving.backends",
    "serving.config",
    "serving.backends.arrays",
    "serving.backends.onnxruntime serving.backends.openvino serving.backends.pytorch serving.backends.tensorrt",
    "serving.backends.tensorflow serving.backends.python serving.backends.ensemble",
    "serving.repository",
    "pipelines.text",
    "pipelines.llm",
    "pipelines.remote",
    "pipelines.stages",
    "pipelines.rag",
    "gateway.access gateway.v2",
    "gateway.options",
    "gateway.telemetry",
    "gateway",
    "gateway.http",
    "gateway.http.openai gateway.http.v2 gateway.http.rag gateway.grpc",
    "gateway.http.app",
    "gateway.assembly",
    "gateway.lifecycle",
    "cli",
    "cli.build cli.doctor cli.rag cli.repository",
    "load",
)
"""Floors from the ground up. Rooms on one floor do not know each other."""
FLOORS = {room: floor for floor, rooms in enumerate(TOWER) for room in rooms.split()}
STRANGERS = (("engine", "serving"), *((each, "load") for each in PACKAGES if each != "load"))
"""Packages that know nothing of each other, whichever stands lower."""
EXCEPTIONS: frozenset[tuple[str, str]] = frozenset()
"""Imports that do not point down, by module; this list only gets shorter."""

FOREIGN_TO_ENGINE = {
    "fastapi",
    "starlette",
    "pydantic",
    "uvicorn",
    "grpc",
    "transformers",
    "tokenizers",
    "tritonclient",
}
FOREIGN_TO_SERVING = {"fastapi", "starlette", "pydantic", "uvicorn", "transformers"}
LIBRARIES = {
    "tensorrt_llm": ("engine/delegated/tensorrt_llm",),
    "openvino": ("engine/runners/openvino", "serving/backends/openvino", "serving/backends/tensorflow"),
    "torch": ("serving/backends/pytorch",),
    "tensorrt": ("serving/backends/tensorrt",),
    "onnxruntime": ("serving/backends/onnxruntime",),
}
"""Heavy libraries, and the folders that may import them."""


def room_of(module: str) -> str:
    """Return the innermost room that a module belongs to."""
    parts = module.split(".")
    return next(room for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in FLOORS)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def names_in(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            yield node.module or ""
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@cache
def imports_of(path: Path) -> frozenset[str]:
    """Every module that a file names in an import, wherever in it."""
    return frozenset(names_in(ast.walk(ast.parse(path.read_text(), str(path)))))


def arrows() -> Iterator[tuple[str, str]]:
    """(importing module, imported module) for every import among the packages."""
    for module, path in modules().items():
        for target in imports_of(path):
            if target in modules() and target != module:
                yield module, target


def points_down(module: str, target: str) -> bool:
    here, there = room_of(module), room_of(target)
    packages = {module.partition(".")[0], target.partition(".")[0]}
    if any(packages == set(pair) for pair in STRANGERS):
        return False
    return here == there or FLOORS[there] < FLOORS[here]


def test_every_arrow_points_down() -> None:
    wrong = {(module, target) for module, target in arrows() if not points_down(module, target)}
    assert wrong == EXCEPTIONS


def test_every_package_has_a_floor() -> None:
    assert {room.partition(".")[0] for room in FLOORS} == set(PACKAGES)
    for room in FLOORS:
        assert room in modules(), f"the tower has a room {room}, and there is no such module"


def test_no_circle_of_files() -> None:
    """Files may be sorted so that each imports only earlier ones, late imports and those of types included."""
    edges: dict[str, set[str]] = {module: set() for module in modules()}
    for module, target in arrows():
        # A package is imported with each of its modules; its face imports them.
        if not module.startswith(f"{target}."):
            edges[module].add(target)
    circles: list[list[str]] = []
    _search_circles(edges, circles)
    assert not circles


def _search_circles(edges: dict[str, set[str]], circles: list[list[str]]) -> None:
    """Collect the groups of modules that reach each other: Tarjan's strongly connected components."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> None:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for target in edges[module]:
            if target not in numbers:
                visit(target)
                lowest[module] = min(lowest[module], lowest[target])
            elif target in path:
                lowest[module] = min(lowest[module], numbers[target])
        if lowest[module] == numbers[module]:
            start = path.index(module)
            group, path[start:] = path[start:], []
            if len(group) > 1:
                circles.append(sorted(group))

    for module in edges:
        if module not in numbers:
            visit(module)


def is_in(target: str, package: str) -> bool:
    return target == package or target.startswith(package + ".")


@pytest.mark.parametrize(("package", "foreign"), [("engine", FOREIGN_TO_ENGINE), ("serving", FOREIGN_TO_SERVING)])
def test_a_package_knows_no_protocol_and_no_text(package: str, foreign: set[str]) -> None:
    for module, path in modules().items():
        if is_in(module, package):
            found = {target.partition(".")[0] for target in imports_of(path)} & foreign
            assert not found, f"{module} imports {found}"


def test_the_ground_floor_needs_the_standard_library_alone() -> None:
    for module, path in modules().items():
        if is_in(module, "sluice"):
            tops = {target.partition(".")[0] for target in imports_of(path)}
            assert tops <= {"sluice", *sys.stdlib_module_names}, f"{module} imports {tops}"


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_heavy_library_is_imported_only_in_its_own_folder(library: str) -> None:
    for module, path in modules().items():
        if not any(path.is_relative_to(ROOT / folder) for folder in LIBRARIES[library]):
            assert not any(is_in(target, library) for target in imports_of(path)), f"{module} imports {library}"


WITHOUT_THE_OTHERS = """
import sys

ALLOWED = {"engine", "sluice", "numpy", "msgspec", "zmq", "packaging", *sys.stdlib_module_names}

class Others:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Others())
import engine.delegated.tensorrt_llm.process
"""


def test_an_engine_under_another_python_needs_little() -> None:
    """What docs/tensorrt-llm.md has installed into TensorRT-LLM's environment, which has numpy."""
    subprocess.run([sys.executable, "-c", WITHOUT_THE_OTHERS], cwd=ROOT, check=True, timeout=60)


def test_the_planner_is_pure() -> None:
    forbidden = {"asyncio", "logging", "time", "threading", "random", "os", "zmq"}
    for name in ("planner", "policies"):
        used = {target.partition(".")[0] for target in imports_of(modules()[f"engine.scheduling.{name}"])}
        assert not used & forbidden
