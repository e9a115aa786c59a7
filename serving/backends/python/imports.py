"""Imports of a model's code, as far as they can be told without running it. Reads files: for threads."""

import ast
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder, all_suffixes
from pathlib import Path

from sluice.serving.backends.python.worker.start import OWN_PACKAGE, is_source_tree
from sluice.serving.findings import Finding

_PROVIDED = frozenset(("triton_python_backend_utils", "c_python_backend_utils"))
_GUARDS = frozenset(("ImportError", "ModuleNotFoundError", "Exception", "BaseException"))
FindInstalled = Callable[[Sequence[str]], set[str]]
"""Returns those of the modules that the model's interpreter finds without the model's folders."""


@dataclass(slots=True)
class _Imports:
    """Names of modules, each with the place that first imports it. `later` are those inside of functions."""

    first: dict[str, str] = field(default_factory=dict)
    later: dict[str, str] = field(default_factory=dict)


def import_findings(
    script: Path, folders: Sequence[Path], find_installed: FindInstalled
) -> tuple[list[Finding], list[Finding]]:
    """Return the errors and the notes on what a model imports. `folders` have its own modules, in their order."""
    imports = _read_imports(script, folders)
    own = {name for name in (*imports.first, *imports.later) if _find_own(name, folders) is not None}
    names = sorted({*imports.first, *imports.later} - _PROVIDED)
    standard = {name for name in names if name in sys.stdlib_module_names}
    installed = find_installed([name for name in names if name not in standard]) - {OWN_PACKAGE}
    missing = set(names) - own - standard - installed
    errors = [_missing(name, place) for name, place in imports.first.items() if name in missing]
    notes = [
        _missing(name, place, " when it runs")
        for name, place in imports.later.items()
        if name in missing and name not in imports.first
    ]
    notes += [_loses(name, folders) for name in sorted(own & (standard | installed))]
    return errors, notes


def find_in_server(names: Sequence[str]) -> set[str]:
    """Return the modules that the server's own interpreter finds; none of the folders of a source tree of Sluice."""
    path = [each for each in sys.path if each and not is_source_tree(each)]
    return {name for name in names if PathFinder.find_spec(name, path) is not None}


def _missing(name: str, place: str, when: str = "") -> Finding:
    return Finding(f"{place}: it imports '{name}'{when}, which its Python does not have")


def _loses(name: str, folders: Sequence[Path]) -> Finding:
    return Finding(
        f"{_find_own(name, folders)} is not what `import {name}` finds: an installed module has this name, and comes "
        "first"
    )


def _find_own(name: str, folders: Sequence[Path]) -> Path | None:
    """Return the file or folder of a model's own module."""
    for folder in folders:
        for path in (folder / name, *(folder / f"{name}{suffix}" for suffix in all_suffixes())):
            if path.is_dir() if path.name == name else path.is_file():
                return path
    return None


def _read_imports(script: Path, folders: Sequence[Path]) -> _Imports:
    """Read the imports of a file and of the model's own modules that it imports when it is imported itself."""
    found, waiting, seen = _Imports(), [script], {script}
    while waiting:
        file = waiting.pop()
        for name, line, is_later in _imports_of(file):
            (found.later if is_later else found.first).setdefault(name, f"{file}:{line}")
            own = _find_own(name, folders)
            if own is not None and own.is_dir():
                own = own / "__init__.py"
            if own is not None and own.suffix == ".py" and own.is_file() and own not in seen and not is_later:
                seen.add(own)
                waiting.append(own)
    return found


def _imports_of(file: Path) -> Iterator[tuple[str, int, bool]]:
    """Yield the name, the line and whether a function imports it. A file that cannot be read has none."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    yield from _walk(tree.body, is_later=False)


def _walk(nodes: Iterable[ast.AST], *, is_later: bool) -> Iterator[tuple[str, int, bool]]:
    for node in nodes:
        match node:
            case ast.Import():
                yield from ((each.name.partition(".")[0], node.lineno, is_later) for each in node.names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0], node.lineno, is_later
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda():
                yield from _walk(ast.iter_child_nodes(node), is_later=True)
            case ast.Try() if any(_catches_imports(each) for each in node.handlers):
                # What fails there is the model's own business.
                yield from _walk([*node.orelse, *node.finalbody], is_later=is_later)
            case ast.If():
                yield from _walk_branches(node, is_later=is_later)
            case _:
                yield from _walk(ast.iter_child_nodes(node), is_later=is_later)


def _walk_branches(node: ast.If, *, is_later: bool) -> Iterator[tuple[str, int, bool]]:
    """Yield what one of the branches may import, and nothing of those for a type checker."""
    if "TYPE_CHECKING" not in ast.dump(node.test):
        yield from _walk(node.body, is_later=True)
    yield from _walk(node.orelse, is_later=True)


def _catches_imports(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(kind is None or (isinstance(kind, ast.Name) and kind.id in _GUARDS) for kind in kinds)
