"""Generates the tables of docs/reference/flags.md from the options of `sluice serve`."""

from typing import Any

from sluice.gateway.options.command_line import ACCEPTED_FLAGS, format_default
from sluice.gateway.options.config import GROUPS, list_options
from sluice.gateway.options.option import Option
from tests.tools.markdown import code, codes, plain, table


def _flags() -> str:
    parts = []
    for group in GROUPS.values():
        title, _, note = (group.__doc__ or "").partition("\n")[0].partition(": ")
        rows = [_row(declared, default) for _, default, declared in list_options(group)]
        parts.append(f"## {title}\n\n{_sentence(note)}{table(('Flag and variable', 'Default', 'Effect'), rows)}")
    return "\n\n".join(parts)


def _sentence(note: str) -> str:
    return f"{plain(note[0].upper() + note[1:]).rstrip('.')}.\n\n" if note else ""


def _row(declared: Option, default: Any) -> list[str]:
    names = (declared.flag, *declared.aliases)
    metavar = f" {declared.metavar}" if declared.metavar and declared.flag.startswith("-") else ""
    return [
        codes(f"{name}{metavar}" for name in names),
        code(declared.variable),
        code(shown) if (shown := format_default(default)) else "",
        plain(declared.help),
    ]


def _accepted() -> str:
    return table(("Flag", "Instead"), ([code(each.flag), plain(each.advice)] for each in ACCEPTED_FLAGS))


TABLES = {"flags": _flags, "accepted-flags": _accepted}
