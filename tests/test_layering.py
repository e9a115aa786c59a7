"""Every arrow points down: `tests/layers.py` has the tower, and what an arrow is."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterable

import pytest

from tests.layers import (
    EXCEPTIONS,
    FACE,
    FLOORS,
    PACKAGES,
    arrows,
    imports_of,
    modules,
    names_in,
    order_of_rooms,
    points_down,
    room_of,
    statements,
)
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
    "opentelemetry": ("record/otel.py", "gateway/telemetry/otlp.py"),
}
"""Heavy libraries, and the folders that may import them."""


def test_every_arrow_points_down() -> None:
    wrong = {(module, target) for module, target in arrows() if not points_down(module, target)}
    assert wrong == EXCEPTIONS


def test_rooms_are_folders_and_every_package_has_one() -> None:
    assert {room.partition(".")[0] for room in FLOORS} == set(PACKAGES)
    for room in FLOORS:
        assert (ROOT / room.replace(".", "/")).is_dir(), f"the tower has a room {room}, and there is no such folder"


@pytest.mark.parametrize("folder", [*PACKAGES, "benchmarks", "deploy", "tests", "training"])
def test_everything_is_imported_below_sluice(folder: str) -> None:
    """`import engine` would find the folder from the top of the repository, and nothing where Sluice is installed."""
    for path in (ROOT / folder).rglob("*.py"):
        if "data" not in path.relative_to(ROOT).parts:
            nodes = statements(ast.parse(path.read_text(), str(path)))
            names = names_in(node for node in nodes if not getattr(node, "level", 0))
            bare = {name for name in names if name.partition(".")[0] in PACKAGES[1:]}
            assert not bare, f"{path} imports {bare}: write `sluice.` before the name"


@pytest.mark.parametrize("whole", ["", "engine.delegated", "gateway.front.http"])
def test_rooms_on_their_floors_and_the_files_beside_them_have_an_order(whole: str) -> None:
    """Each imports only earlier ones. A file that is used on one floor imports nothing of those above. A folder with
    rooms in it has a place too, taken as a whole."""

    def group_of(module: str) -> str:
        return whole if whole and is_in(module, whole) else room_of(module)

    assert not circles(group_of, ((group_of(room), group_of(below)) for room, below in order_of_rooms()))


def test_files_have_an_order() -> None:
    """Each imports only earlier ones, late imports and those of types included."""
    assert not circles(str)


def circles(group_of: Callable[[str], str], more: Iterable[tuple[str, str]] = ()) -> list[list[str]]:
    """Return the groups of modules that import each other in a circle, where `more` arrows between groups count too."""
    edges: dict[str, set[str]] = {group_of(module): set() for module in modules()}
    # A package is imported with each of its modules; its face imports them.
    known = ((group_of(a), group_of(b)) for a, b in arrows() if a != FACE and not a.startswith(f"{b}."))
    for here, there in (*known, *more):
        if here != there:
            edges[here].add(there)
    found: list[list[str]] = []
    _search_circles(edges, found)
    return found


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

ALLOWED = {"sluice", "numpy", "msgspec", "zmq", "packaging", *sys.stdlib_module_names}

class Others:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Others())
import sluice.engine.delegated.tensorrt_llm.process
"""


def test_an_engine_under_another_python_needs_little() -> None:
    """It needs what docs/tensorrt-llm.md has installed into TensorRT-LLM's environment, which has numpy."""
    subprocess.run([sys.executable, "-c", WITHOUT_THE_OTHERS], cwd=ROOT, check=True, timeout=60)


def test_the_planner_is_pure() -> None:
    forbidden = {"asyncio", "logging", "time", "threading", "random", "os", "zmq"}
    used = {target.partition(".")[0] for target in imports_of(modules()["engine.scheduling.planner"])}
    assert not used & forbidden
