"""Generates the tables of docs/tensorrt-llm.md from the tables in the code.

`python -m tests.tools.tensorrt_llm_tables` writes them between the markers of the document.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

from engine.delegated.tensorrt_llm.configuration.arguments import FIELDS
from engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from engine.delegated.tensorrt_llm.sampling import FIELDS as SAMPLING
from engine.runtime_settings import RuntimeSetting
from tests import paths

DOCS = paths.DOCS / "tensorrt-llm.md"


def tables() -> dict[str, str]:
    """Return the tables in Markdown, by the name of their markers."""
    return {"fields": _fields(), "settings": _settings(), "sampling": _sampling()}


def markers(name: str) -> tuple[str, str]:
    """Return the lines before and after a table."""
    return f"<!-- table: {name} -->", f"<!-- end of table: {name} -->"


def section(document: str, name: str) -> str:
    """Return the text between the markers. Raises ValueError where there are none."""
    begin, end = markers(name)
    start = document.index(begin) + len(begin)
    return document[start : document.index(end, start)].strip()


def filled(document: str) -> str:
    """Return the document with its tables replaced."""
    for name, table in tables().items():
        begin, end = markers(name)
        before, _, rest = document.partition(begin)
        behind = rest.partition(end)[2]
        document = f"{before}{begin}\n{table}\n{end}{behind}"
    return document


def _fields() -> str:
    rows = ([_code(field.name), _code(field.target), field.note] for field in FIELDS)
    return _table(("Ours", "Argument of the LLM class", ""), rows)


def _settings() -> str:
    parts = []
    for title, rows in SETTINGS.groups.items():
        columns = ("Setting", "Also called", "Argument of the LLM class", "", "Where")
        cells = ([_code(row.name), _codes(row.aliases), _argument(row), _text(row), _where(row)] for row in rows)
        parts.append(f"**{title}**\n\n{_table(columns, cells)}")
    return "\n\n".join(parts)


def _argument(row: RuntimeSetting) -> str:
    if row.target or row.no_effect:
        return _code(row.target)
    return "the adapter's own"


def _text(row: RuntimeSetting) -> str:
    return row.help or f"No effect: {row.no_effect}."


def _where(row: RuntimeSetting) -> str:
    words = []
    if row.since:
        words.append(f"from {row.since}")
    if row.until:
        words.append(f"before {row.until}")
    return ", ".join((*words, *filter(None, (row.backend,))))


def _sampling() -> str:
    rows = ([_code(field.name), _codes(field.ours.split(", ")), field.note] for field in SAMPLING)
    return _table(("Field of SamplingParams", "Ours", ""), rows)


def _table(columns: Iterable[str], rows: Iterable[list[str]]) -> str:
    titles = list(columns)
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _codes(texts: Iterable[str]) -> str:
    return ", ".join(_code(text) for text in texts if text)


if __name__ == "__main__":
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS
    path.write_text(filled(path.read_text()))
