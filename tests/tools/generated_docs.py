"""The generated parts of the documentation: `python -m tests.tools.generated_docs [--measure]` writes them.

A page has a block for each: the text between `<!-- generated: NAME -->` and `<!-- end -->`. Tables come from the code
alone, and a test proves them current. Measurements of the code (`--measure`) start a server; tests check the bounds
that docs/reference/structure.md states for them.
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tests.paths import DOCS, ROOT
from tests.tools import (
    compatibility_tables,
    flag_tables,
    metric_tables,
    sampling_tables,
    structure_page,
    tensorrt_llm_tables,
    triton_qa_tables,
    vllm_tables,
)

BLOCK = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
TABLES: Mapping[str, Callable[[], str]] = {
    **compatibility_tables.TABLES,
    **flag_tables.TABLES,
    **metric_tables.TABLES,
    **sampling_tables.TABLES,
    **tensorrt_llm_tables.TABLES,
    **triton_qa_tables.TABLES,
    **vllm_tables.TABLES,
}
"""Makers of blocks by name."""
MEASUREMENTS = structure_page.MEASUREMENTS
"""Names of the blocks that `structure_page.measure` makes."""


def pages() -> list[Path]:
    """Return every page of the documentation."""
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]


def block_names(text: str) -> Iterator[str]:
    """Yield the names of a page's blocks."""
    return (match[2] for match in BLOCK.finditer(text))


def fill(text: str, contents: Mapping[str, str]) -> str:
    """Return a page with the blocks replaced that `contents` has."""
    return BLOCK.sub(lambda match: _block(match, contents[match[2]]) if match[2] in contents else match[0], text)


def _block(match: re.Match[str], content: str) -> str:
    """Return a block. Blank lines separate its content from the comments, as Markdown wants for tables."""
    return f"{match[1]}\n{content}\n\n{match[3]}"


def without_blocks(text: str) -> str:
    """Return a page without its generated text."""
    return BLOCK.sub(lambda match: match[1] + match[3], text)


def main(arguments: list[str]) -> None:
    contents = {name: make() for name, make in TABLES.items()}
    if "--measure" in arguments:
        contents |= structure_page.measure()
    for path in pages():
        text = path.read_text()
        filled = fill(text, contents)
        if filled != text:
            path.write_text(filled)
            sys.stdout.write(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
