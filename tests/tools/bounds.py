"""What tests/bounds.toml bounds: `python -m tests.tools.bounds` prints each measure beside its bound.

`--tighten` lowers every bound to what is measured. A bound that is raised needs the number of the issue that allows it
in its row; `tests/test_bounds.py` compares the file with its own history.
"""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from tests.layers import PACKAGES, folder_name, modules, names_in, statements
from tests.paths import TESTS
from tests.tools.structure import num_lines, repeated_classes

FILE = TESTS / "bounds.toml"
PATHS = "path"
"""The table of bounds that `tests/docs/test_structure.py` measures, with a running server."""
_STARTERS = frozenset({"subprocess", "multiprocessing", "tests.server_process", "tests.fork_server"})
"""Imports by which a test file starts processes itself."""
_CLOCKS = re.compile(r"(.+\.)?((perf_counter|monotonic|process_time|thread_time)(_ns)?)|loop\.time")
"""A test that asserts at most so much of them asserts how fast the machine is, and how busy."""
_SLEEP_OR_CLOCK = re.compile(rf"sleep\(|{_CLOCKS.pattern}")


class Bound(NamedTuple):
    """The most that a measure may be, and the issue that allowed the last raise."""

    most: int
    issue: int | None = None


def read_bounds(text: str) -> dict[str, Bound]:
    """Return the bounds of a bounds.toml by dotted name. Raises ValueError for a row that is none."""
    bounds = {}
    for table, rows in tomllib.loads(text).items():
        for name, row in rows.items():
            if not row.keys() <= {"most", "issue"} or not all(type(value) is int for value in row.values()):
                raise ValueError(f"{table}.{name} must have a number `most`, and may have `issue`; got {row}")
            bounds[f"{table}.{name}"] = Bound(**row)
    return bounds


def loosened(before: Mapping[str, Bound], after: Mapping[str, Bound]) -> list[str]:
    """Return what is wrong in a change from `before` to `after`: bounds that rose without an issue, or are gone."""
    wrong = [f"{name} is gone" for name in before if name not in after]
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        if new.most > old.most and new.issue in (None, old.issue):
            wrong.append(f"{name} rose from {old.most} to {new.most}: name another issue, which allows it")
    return sorted(wrong)


def measure() -> dict[str, int]:
    """Return all measures but those of PATHS."""
    measures: dict[str, int] = {}
    for package in PACKAGES:
        files = [path for module, path in modules().items() if module.partition(".")[0] == package]
        measures |= {f"files.{package}": len(files), f"lines.{package}": sum(map(num_lines, files))}
    tests = [path for path in sorted(TESTS.rglob("*.py")) if "data" not in path.relative_to(TESTS).parts]
    measures |= {"files.tests": len(tests), "lines.tests": sum(map(num_lines, tests))}
    return measures | _measure_code() | _measure_waits(tests)


def _measure_code() -> dict[str, int]:
    protocols, attributes, imports = 0, [0], [0]
    for path in modules().values():
        nodes = [*statements(ast.parse(path.read_text(), str(path)))]
        classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
        protocols += sum(any(ast.unparse(base).startswith("Protocol") for base in node.bases) for node in classes)
        attributes += [len({*_attributes(node)}) for node in classes]
        imports.append(len({*map(folder_name, names_in(iter(nodes)))} & modules().keys()))
    return {
        "code.protocols": protocols,
        "code.attributes_of_the_largest_class": max(attributes),
        "code.imports_of_the_widest_module": max(imports),
        "code.class_names_that_stand_twice": len(repeated_classes(dict(modules()))),
    }


def _measure_waits(tests: list[Path]) -> dict[str, int]:
    sleeps = loops = bars = 0
    texts = [path.read_text() for path in tests]
    for text in filter(_SLEEP_OR_CLOCK.search, texts):
        lines = text.splitlines()
        for statement in ast.parse(text).body:
            source = "\n".join(lines[statement.lineno - 1 : statement.end_lineno])
            if "sleep(" in source:
                for node in ast.walk(statement):
                    sleeps += _is_sleep(node)
                    loops += isinstance(node, ast.While) and any(map(_is_sleep, ast.walk(node)))
            if _CLOCKS.search(source):
                bars += num_time_bars(statement)
    return {
        "tests.sleeps": sleeps,
        "tests.waiting_loops": loops,
        "tests.files_that_start_processes": sum(map(_starts_processes, texts)),
        "tests.time_bars": bars,
    }


def _starts_processes(text: str) -> bool:
    if not any(f"import {each}" in text or f"from {each} " in text for each in _STARTERS):
        return False
    for node in statements(ast.parse(text)):
        match node:
            case ast.Import(names) if any(alias.name in _STARTERS for alias in names):
                return True
            case ast.ImportFrom(module) if module in _STARTERS:
                return True
    return False


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value) | ast.Call(value):
            return _name(value)
    return ""


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Yield the names of what an object of the class holds: fields, and what its methods set."""
    for each in node.body:
        match each:
            case ast.AnnAssign(target=ast.Name(name)):
                yield name
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                for statement in statements(each):
                    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
                    for inner in (node for target in targets if target for node in ast.walk(target)):
                        match inner:
                            case ast.Attribute(ast.Name("self"), name, ast.Store()):
                                yield name


def _is_sleep(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) == "sleep"


def num_time_bars(definition: ast.stmt) -> int:
    """Count the assertions that time is short: of a clock, or of what a function has taken from one. A deadline in a
    loop that waits is none."""
    nodes = [*ast.walk(definition)]
    looping = {id(each) for node in nodes if isinstance(node, ast.While) for each in ast.walk(node)}
    timed: set[str] = set()
    for _ in range(2):  # what is taken from what was taken
        for node in nodes:
            match node:
                case ast.Assign([ast.Name(name)], value) if _tells_time(value, timed):
                    timed.add(name)
                case ast.Call(ast.Attribute(ast.Name(name), "append"), [value]) if _tells_time(value, timed):
                    timed.add(name)
    asserted = [node.test for node in nodes if isinstance(node, ast.Assert) and id(node) not in looping]
    return sum(_is_bar(each, timed) for test in asserted for each in ast.walk(test))


def _is_bar(node: ast.AST, timed: set[str]) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    less = zip([node.left, *node.comparators], node.ops, strict=False)
    more = zip(node.comparators, node.ops, strict=True)
    return any(isinstance(op, ast.Lt | ast.LtE) and _tells_time(left, timed) for left, op in less) or any(
        isinstance(op, ast.Gt | ast.GtE) and _tells_time(right, timed) for right, op in more
    )


def _tells_time(value: ast.AST, timed: set[str]) -> bool:
    for each in ast.walk(value):
        match each:
            case ast.Call(function) if _CLOCKS.fullmatch(ast.unparse(function)):
                return True
            case ast.Name(name) if name in timed:
                return True
    return False


def tighten(text: str, measures: Mapping[str, int]) -> str:
    """Return a bounds.toml with each bound lowered to what was measured."""
    table, lines = "", []
    for line in text.splitlines():
        if heading := re.fullmatch(r"\[(\w+)\]", line):
            table = heading[1]
        row: Any = re.fullmatch(r"(\w+) = \{ most = ([\d_]+)(.*)", line)
        measured = measures.get(f"{table}.{row[1]}") if row else None
        if measured is not None and measured < int(row[2]):
            line = f"{row[1]} = {{ most = {measured}{row[3]}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def main(arguments: list[str]) -> None:
    measures, text = measure(), FILE.read_text()
    if "--tighten" in arguments:
        FILE.write_text(tighten(text, measures))
    bounds = read_bounds(FILE.read_text())
    for name, most in bounds.items():
        if name in measures:
            mark = "  TOO MUCH" if measures[name] > most.most else ""
            sys.stdout.write(f"{name:45} {measures[name]:8,} of {most.most:8,}{mark}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
