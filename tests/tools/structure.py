"""Figures about the shape of the code: `python -m tests.tools.structure [ROOM ...]`.

It prints files, lines and the median file, then what wants a second look: small files with one importer, class names
that stand twice, docstrings that open without a subject, and imports that do not point down. Without a ROOM (a dotted
prefix such as `serving.config`) it looks at every package of the product.
"""

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tests.layers import PACKAGES, arrows, module_of, modules, points_down
from tests.paths import ROOT

SMALL_LINES = 60
"""A file below this that one neighbour alone imports may belong inside that neighbour."""
MERGED_LINES = 300
"""Most lines that two merged files should have together."""
BARE_OPENINGS = frozenset({"who", "whom", "whose", "what", "of", "that", "those"})
"""Words that open a fragment: a docstring that begins with one has no subject."""
_PUBLIC_CLASS = re.compile(r"^class ([A-Za-z]\w*)[(:]", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Prose:
    """A docstring, of a module, class, function or attribute."""

    path: Path
    line: int
    text: str

    @property
    def is_bare(self) -> bool:
        """Whether it opens with a bare relative pronoun or preposition."""
        first = self.text.split(maxsplit=1)[0].strip("`*.,:;\"'").lower() if self.text.strip() else ""
        return first in BARE_OPENINGS

    @property
    def place(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}"


def docstrings(path: Path) -> Iterator[Prose]:
    """Yield every string that stands as a statement of its own."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield Prose(path, node.lineno, node.value.value)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def dust(only: dict[str, Path]) -> Iterator[tuple[str, int, str]]:
    """Yield (module, lines, importer) of small files that one file of the same folder alone imports."""
    importers: dict[str, set[str]] = defaultdict(set)
    for module, target in arrows():
        importers[target].add(module)
    for module, path in only.items():
        lines = num_lines(path)
        if path.name == "__init__.py" or lines >= SMALL_LINES or len(importers[module]) != 1:
            continue
        (importer,) = importers[module]
        neighbour = modules()[importer]
        if neighbour.parent == path.parent and lines + num_lines(neighbour) < MERGED_LINES:
            yield module, lines, importer


def repeated_classes(only: dict[str, Path]) -> dict[str, list[str]]:
    """Return the public class names that more than one module defines, one of them in `only`."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        for name in _PUBLIC_CLASS.findall(path.read_text()):
            places[name].append(module)
    return {name: found for name, found in sorted(places.items()) if len(found) > 1 and set(found) & only.keys()}


def report(rooms: list[str]) -> Iterator[str]:
    """Yield the lines of the report."""
    only = {
        module: path
        for module, path in modules().items()
        if not rooms or any(module == room or module.startswith(f"{room}.") for room in rooms)
    }
    sizes = [num_lines(path) for path in only.values()]
    yield f"files {len(sizes)}, lines {sum(sizes)}, median file {median(sizes):g} lines"
    yield f"files over 400 lines: {', '.join(m for m, p in only.items() if num_lines(p) > 400) or 'none'}"
    small = sorted(dust(only))
    yield f"small files with one importer in their folder: {len(small)}"
    yield from (f"  {module} ({lines}) -> {importer}" for module, lines, importer in small)
    repeated = repeated_classes(only)
    yield f"class names that stand twice: {len(repeated)}"
    yield from (f"  {name}: {', '.join(found)}" for name, found in repeated.items())
    bare = [each for path in only.values() for each in docstrings(path) if each.is_bare]
    yield f"docstrings that open without a subject: {len(bare)}"
    yield from (f"  {each.place}: {each.text.splitlines()[0]}" for each in bare)
    wrong = [(module, target) for module, target in arrows() if not points_down(module, target)]
    yield f"imports that do not point down: {len(wrong)}"
    yield from (f"  {module} -> {target}" for module, target in wrong)


def main(rooms: list[str]) -> None:
    for line in report(rooms):
        sys.stdout.write(line + "\n")


__all__ = ["PACKAGES", "Prose", "docstrings", "dust", "module_of", "repeated_classes", "report"]

if __name__ == "__main__":
    main(sys.argv[1:])
