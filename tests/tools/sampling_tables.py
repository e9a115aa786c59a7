"""Generates the table of docs/reference/sampling-fields.md from `sluice.engine.sampling_fields`."""

from typing import Any

from sluice.engine.runtimes import RUNTIMES
from sluice.engine.sampling_fields import SAMPLING_FIELDS, FieldKind, SamplingField
from tests.tools.markdown import code, codes, plain, table

_KINDS = {
    FieldKind.FLOAT: "number",
    FieldKind.INTEGER: "integer",
    FieldKind.BOOLEAN: "boolean",
    FieldKind.SWITCH: "boolean or integer",
    FieldKind.TOKEN_IDS: "token ids",
    FieldKind.TOKEN_BIASES: "numbers by token id",
}


def _sampling() -> str:
    columns = ("Field", "Values", "Input of v2", "Runtimes", "Meaning")
    return table(columns, map(_row, SAMPLING_FIELDS.values()))


def _row(field: SamplingField) -> list[str]:
    allowed = f", {field.allowed.text}" if field.allowed is not None else ""
    return [
        code(field.name),
        f"{_KINDS[field.kind]}{allowed}{_default(field.default)}",
        f"{field.datatype}: {codes((field.name, *field.aliases))}" if field.datatype else "",
        _runtimes(field),
        plain(f"{field.help} {field.tensor_help}".strip()),
    ]


def _default(value: Any) -> str:
    """Return a default as a client would write it; nothing for no value."""
    if value is None or value in ((), {}):
        return ""
    return f"; default {code(str(value).lower() if isinstance(value, bool) else f'{value:g}')}"


def _runtimes(field: SamplingField) -> str:
    having = [spec for spec in RUNTIMES.values() if not field.is_optional or field.name in spec.sampling_fields]
    return "all" if len(having) == len(RUNTIMES) else ", ".join(spec.title for spec in having)


TABLES = {"sampling-fields": _sampling}
