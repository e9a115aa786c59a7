"""Generates the tables of docs/tensorrt-llm.md from the tables of TensorRT-LLM's adapter."""

from engine.delegated.tensorrt_llm.configuration.arguments import FIELDS
from engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from engine.delegated.tensorrt_llm.sampling import FIELDS as SAMPLING
from engine.runtime_settings import RuntimeSetting
from tests.tools.markdown import code, codes, table


def _fields() -> str:
    rows = ([code(field.name), code(field.target), field.note] for field in FIELDS)
    return table(("Ours", "Argument of the LLM class", ""), rows)


def _settings() -> str:
    parts = []
    for title, rows in SETTINGS.groups.items():
        columns = ("Setting", "Also called", "Argument of the LLM class", "", "Where")
        cells = ([code(row.name), codes(row.aliases), _argument(row), _text(row), _where(row)] for row in rows)
        parts.append(f"**{title}**\n\n{table(columns, cells)}")
    return "\n\n".join(parts)


def _argument(row: RuntimeSetting) -> str:
    if row.target or row.no_effect:
        return code(row.target)
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
    rows = ([code(field.name), codes(field.ours.split(", ")), field.note] for field in SAMPLING)
    return table(("Field of SamplingParams", "Ours", ""), rows)


TABLES = {"tensorrt-llm-fields": _fields, "tensorrt-llm-settings": _settings, "tensorrt-llm-sampling": _sampling}
