"""Fields that protocols share: those of sampling, made from the table `sluice.engine.sampling_fields`, and tools."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any

from pydantic import AfterValidator, Discriminator, Field, Tag, create_model

from sluice.engine.sampling_fields import MAX_SEED, FieldKind, FieldOrigin, SamplingField
from sluice.errors import invalid
from sluice.gateway.front.http.parsing import RequestObject, WholeNumber, quote_value, text_or_object, union_error

MAX_TOOLS = 128
"""Most tools of one request: OpenAI's limit."""
THINKING_SWITCHES = ("enable_thinking", "thinking")
"""Arguments by which the chat templates of Qwen and DeepSeek switch the reasoning on and off."""
MAX_TOOL_NAME_CHARS = 128
"""Most characters of a tool's name: Anthropic's and MCP's limit. OpenAI's own is 64, and its clients send longer ones
of MCP servers elsewhere."""
TOOL_NAME_HELP = f"Of letters, digits, _, - and ., at most {MAX_TOOL_NAME_CHARS}."
_NAME = re.compile(rf"[A-Za-z0-9_.-]{{1,{MAX_TOOL_NAME_CHARS}}}")


_VALUES = frozenset(("const", "default", "enum", "examples", "example"))
"""Keywords whose values are no schemas, and may be null."""


def _without_nulls(schema: Any) -> Any:
    """Return a JSON schema without keywords that are null, as clients write those that they leave out."""
    if isinstance(schema, list):
        return [_without_nulls(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: value if name in _VALUES else _without_nulls(value)
        for name, value in schema.items()
        if value is not None or name in _VALUES
    }


ToolSchema = Annotated[dict[str, Any], AfterValidator(_without_nulls)]
"""The JSON schema of a function's arguments."""
SentArguments = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[dict[str, Any], Tag("<object>")],
    Discriminator(text_or_object, **union_error("an object, or the text of one")),
]
"""The arguments of an earlier call, with what models and clients write beside OpenAI's text of an object: the object
itself, and any text, as of a call that was cut off."""


def json_text(value: object) -> str:
    """Return a value as JSON, and what is text already as it is: clients write schemas so, and models write more than
    JSON as the arguments of calls."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def check_tool_names(names: Sequence[str], path: str | Sequence[str]) -> None:
    """Raise INVALID for the name of a tool that is none, or another tool's. `path` has {} for its index, or is the path
    of each."""
    for index, name in enumerate(names):
        place = path.format(index) if isinstance(path, str) else path[index]
        if not _NAME.fullmatch(name):
            size = f"1 to {MAX_TOOL_NAME_CHARS}"
            raise invalid(place, f"{place} must have {size} letters, digits, _, - and ., got {quote_value(name)}")
        if names.index(name) < index:
            raise invalid(place, f"{place} is {quote_value(name)} as that of another tool; names must differ")


def _switch_kind(value: Any) -> str | None:
    if isinstance(value, bool):
        return "<flag>"
    return "<number>" if isinstance(value, int) else None


_Switch = Annotated[
    Annotated[bool, Tag("<flag>")] | Annotated[int, Tag("<number>")],
    Discriminator(_switch_kind, **union_error("true, false or an integer")),
]
_TYPES: dict[FieldKind, Any] = {
    FieldKind.FLOAT: float,
    FieldKind.INTEGER: WholeNumber,
    FieldKind.BOOLEAN: bool,
    FieldKind.SWITCH: _Switch,
    FieldKind.TOKEN_IDS: list[int],
    FieldKind.TOKEN_BIASES: dict[str, float],
}
_SCOPES = {
    FieldOrigin.OPENAI: "",
    FieldOrigin.VLLM: "vLLM's. ",
    FieldOrigin.TRANSFORMERS: "transformers'. ",
    FieldOrigin.TENSORRT_LLM: "With TensorRT-LLM alone. ",
}


def build_sampling_schema(fields: Iterable[SamplingField]) -> Any:
    """Return a model with the given sampling fields, each of which may be absent or null."""
    return create_model("SamplingFields", __base__=RequestObject, **{each.name: _schema(each) for each in fields})


def _schema(field: SamplingField) -> Any:
    extra: dict[str, Any] = {"ge": field.openai_minimum}
    if field.kind is FieldKind.TOKEN_IDS:
        extra = {"fail_fast": True, "max_length": field.max_length, "min_length": 0 if field.off else 1}
    return _TYPES[field.kind] | None, Field(None, description=_SCOPES[field.origin] + field.help, **extra)


def _logit_bias(sent: dict[str, float]) -> dict[int, float]:
    """Key the biases by token id: JSON has no keys but strings."""
    for key in sent:
        if not re.fullmatch(r"\d{1,10}", key, re.ASCII):
            raise invalid("logit_bias", f"the keys of logit_bias must be token ids, got {key[:40]!r}")
    return {int(key): bias for key, bias in sent.items()}


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "seed": lambda value: value & MAX_SEED if value < 0 else value,
    "top_k": lambda value: 0 if value == -1 else value,
    "early_stopping": int,
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "logit_bias": _logit_bias,
}
"""Fields that the engine has in another type or with another value for off."""
