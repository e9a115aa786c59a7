"""Generates the tables of docs/tensorrt-llm.md from the tables of TensorRT-LLM's adapter."""

from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from sluice.engine.delegated.tensorrt_llm.library import MINIMUM
from sluice.engine.delegated.tensorrt_llm.samplers import ROWS, Row, SamplerEffect
from sluice.engine.delegated.tensorrt_llm.sampling import FIELDS as SAMPLING
from tests.tools.markdown import code, codes, table


def _settings() -> str:
    rows = SETTINGS.groups["operators"]
    cells = ([code(row.name), codes(row.aliases), row.help] for row in rows)
    return table(("Setting", "Also called", ""), cells)


def _sampling() -> str:
    rows = ([code(field.name), codes(field.ours.split(", ")), field.note] for field in SAMPLING)
    return table(("Field of SamplingParams", "Ours", ""), rows)


def _samplers() -> str:
    columns = ("Sampler", "Field", "Obeyed", "Else, in TensorRT-LLM alone")
    return table(columns, ([row.sampler.value, _concerned(row), _obeyed(row), _else(row)] for row in ROWS))


def _concerned(row: Row) -> str:
    return codes(row.fields) if row.above < 0 else f"{codes(row.fields)} above {row.above}"


def _obeyed(row: Row) -> str:
    words = [f"from {row.obeyed_since}"] if row.obeyed_since else []
    if row.argument:
        words.append(f"with {code(row.argument)}")
    return ", or ".join(words) or "never"


def _else(row: Row) -> str:
    if row.effect(MINIMUM, ()) is SamplerEffect.REFUSED:
        return SamplerEffect.REFUSED.value
    return f"ignored, and refused from {row.refused_since}" if row.refused_since else SamplerEffect.IGNORED.value


TABLES = {
    "tensorrt-llm-settings": _settings,
    "tensorrt-llm-sampling": _sampling,
    "tensorrt-llm-samplers": _samplers,
}
