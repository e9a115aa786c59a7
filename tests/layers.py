"""Every arrow points down: rooms stand on the floors of one tower, and a room imports only what stands below it.

A room is a folder with a subject. A file beside rooms, in the folder that these are in, stands where its own imports
put it: rooms, which keep their floors, and such files can be brought into one order. Imports inside functions and those
for the type checker alone count too: they tie two rooms as any other.

One module is exempt: `sluice` itself, the public face (`from sluice import EngineConfig`), which looks up names of the
rooms above it when they are first asked for. The files beside it, such as `sluice.errors`, are not.
"""

import ast
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path

from tests.paths import ROOT

PACKAGES = ("sluice", "state", "record", "engine", "serving", "pipelines", "gateway", "cli", "load", "tuning")
TOWER = (
    "sluice",
    "state",
    "record",
    "engine",
    "engine.models",
    "engine.runners",
    "engine.sampling",
    "engine.runners.openvino",
    "engine.guidance",
    "engine.forecast",
    "engine.kv_tiers",
    "engine.speculation",
    "engine.loop",
    "engine.process",
    "engine.delegated",
    "engine.delegated.tensorrt_llm",
    "engine.client",
    "engine.fleet",
    "engine.simulation",
    "serving.tensors",
    "serving",
    "serving.caching",
    "serving.batching",
    "serving.backends",
    "serving.config",
    "serving.backends.arrays",
    "serving.backends.onnxruntime serving.backends.openvino serving.backends.pytorch serving.backends.tensorrt",
    "serving.backends.tensorflow serving.backends.python serving.backends.ensemble",
    "serving.repository",
    "pipelines.text",
    "pipelines.chat",
    "pipelines.llm",
    "pipelines.remote",
    "pipelines.stages",
    "pipelines.encoding",
    "pipelines.rag",
    "pipelines.answers",
    "pipelines.routes",
    "gateway.tenancy.access",
    "gateway.tenancy.ledger",
    "gateway.plane",
    "gateway.options",
    "gateway.tenancy.quotas",
    "gateway.tenancy",
    "gateway.watch.logs",
    "gateway.telemetry",
    "gateway.dynamo",
    "gateway.api.v2",
    "gateway.front.http",
    "gateway.answers.streams",
    "gateway.answers.batches",
    "gateway.watch.live",
    "gateway.front.http2",
    "gateway.api.openai gateway.api.v2.http gateway.api.rag gateway.api.v2.grpc gateway.watch.console",
    "gateway.api.admin",
    "gateway.api.ollama",
    "gateway.workers",
    "cli",
    "cli.build cli.doctor cli.fleet cli.keys cli.rag cli.repository cli.smoke",
    "load",
    "load.chaos",
    "tuning",
)
"""Floors from the ground up. Rooms on one floor do not know each other. `engine.scheduling` is no room, as a forecast
of waits stands between its files, nor is `engine.runners.torch`, which has processes of its own."""
FLOORS = {room: floor for floor, rooms in enumerate(TOWER) for room in rooms.split()}
STRANGERS = (
    ("engine", "serving"),
    ("gateway.front.http", "gateway.api.v2.grpc"),
    *((each, "load") for each in PACKAGES if each not in ("load", "sluice", "tuning")),
)
"""Folders that know nothing of each other, whichever stands lower. The load tool measures other servers too; `tuning`
alone, which drives both, knows the two sides."""
FACE = "sluice"
"""The public face: the one module whose imports may point up."""
EXCEPTIONS: frozenset[tuple[str, str]] = frozenset()
"""Imports that do not point down, by module; this list only gets shorter."""


@cache
def room_of(module: str) -> str:
    """Return the innermost room that a module belongs to, or the module itself where it stands beside rooms."""
    parts = module.split(".")
    room = next((room for n in range(len(parts), 0, -1) if (room := ".".join(parts[:n])) in FLOORS), module)
    return module if any(other.startswith(f"{room}.") for other in FLOORS) else room


def folder_name(module: str) -> str:
    """Return a module's name by its folder at the top of the repository: `engine.loop` for `sluice.engine.loop`."""
    inner = module.removeprefix("sluice.")
    return inner if inner.partition(".")[0] in PACKAGES else module


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_of(path): path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))}


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement below a node, which takes a tenth of what `ast.walk` does for all expressions."""
    for part in ("body", "orelse", "handlers", "finalbody", "cases"):
        for node in getattr(tree, part, ()):
            yield node
            yield from statements(node)


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
    """Every module that a file names in an import, wherever in it; Sluice's by the names of their folders."""
    return frozenset(map(folder_name, names_in(statements(ast.parse(path.read_text(), str(path))))))


def arrows() -> Iterator[tuple[str, str]]:
    """(importing module, imported module) for every import among the packages."""
    for module, path in modules().items():
        for target in imports_of(path):
            if target in modules() and target != module:
                yield module, target


def points_down(module: str, target: str) -> bool:
    """Say whether an import is one of a package below, or within a package one that the floors allow."""
    if module == FACE:
        return True
    if any({_which(module, pair), _which(target, pair)} == {*pair} for pair in STRANGERS):
        return False
    package, other = module.partition(".")[0], target.partition(".")[0]
    if package != other:
        return PACKAGES.index(other) < PACKAGES.index(package)
    here, there = room_of(module), room_of(target)
    return here == there or not {here, there} <= FLOORS.keys() or FLOORS[there] < FLOORS[here]


def _which(module: str, folders: tuple[str, str]) -> str:
    return next((each for each in folders if f"{module}.".startswith(f"{each}.")), "")


def order_of_rooms() -> Iterator[tuple[str, str]]:
    """Yield (a room, a room on the next floor below) for all rooms that have no rooms in them."""
    floors = [[room for room in rooms.split() if room_of(f"{room}.x") == room] for rooms in TOWER]
    floors = [rooms for rooms in floors if rooms]
    for below, above in pairwise(floors):
        yield from ((room, other) for room in above for other in below)
