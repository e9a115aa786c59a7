"""Generates the table of docs/reference/sampling-fields.md from the sampling parameters of the engine."""

import msgspec

from engine.runtimes import RUNTIMES
from engine.types import SamplingParams
from engine.validation import RUNTIME_FIELDS
from tests.tools.markdown import code, table


def _sampling() -> str:
    # HOOK: the rows come from the table of engine/sampling_fields.py, once it is there.
    rows = []
    for field in msgspec.structs.fields(SamplingParams):
        default = "" if field.default in (None, (), msgspec.NODEFAULT) else code(str(field.default).lower())
        runtimes = ", ".join(
            spec.title
            for spec in RUNTIMES.values()
            if field.name not in RUNTIME_FIELDS or field.name in spec.sampling_fields
        )
        rows.append([code(field.name), default, runtimes])
    return table(("Field", "Default", "Runtimes"), rows)


TABLES = {"sampling-fields": _sampling}
