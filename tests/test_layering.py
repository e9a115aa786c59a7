"""Every arrow points down: `tests/layers.py` has the tower, and what an arrow is."""

import subprocess
import sys

import pytest

from tests.layers import EXCEPTIONS, FACE, FLOORS, PACKAGES, arrows, imports_of, modules, points_down
from tests.paths import ROOT

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
    "torch": ("engine/runners/torch", "serving/backends/pytorch"),
    "triton": ("engine/runners/torch",),
    "tensorrt": ("serving/backends/tensorrt",),
    "onnxruntime": ("serving/backends/onnxruntime",),
    "dynamo": ("gateway/dynamo",),
    "ray": ("cli/fleet",),
    "optuna": ("tuning/search.py",),
    "opentelemetry": ("gateway/tracing", "gateway/telemetry/otlp.py"),
}
"""Heavy libraries, and the folders that may import them."""


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
    """The public face too, as long as nobody asks it for a name: `tests/sluice/test_public_face.py` imports it."""
    for module, path in modules().items():
        if is_in(module, "sluice") and module != FACE:
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
    """It needs what docs/tensorrt-llm.md has installed into TensorRT-LLM's environment, which has numpy."""
    subprocess.run([sys.executable, "-c", WITHOUT_THE_OTHERS], cwd=ROOT, check=True, timeout=60)


def test_the_planner_is_pure() -> None:
    forbidden = {"asyncio", "logging", "time", "threading", "random", "os", "zmq"}
    for name in ("planner", "policies"):
        used = {target.partition(".")[0] for target in imports_of(modules()[f"engine.scheduling.{name}"])}
        assert not used & forbidden
