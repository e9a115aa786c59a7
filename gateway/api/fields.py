"""Fields that protocols share: those of sampling, made from the table `sluice.engine.sampling_fields`, and tools."""

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import Annotated, Any, NamedTuple, TypeVar

import orjson
from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, create_model

from sluice.engine.sampling_fields import MAX_SEED, FieldKind, FieldOrigin, SamplingField
from sluice.errors import invalid
from sluice.gateway.front.http.parsing import RequestObject, WholeNumber, quote_value, text_or_object, union_error
from sluice.pipelines.chat.formats import NAME_CHARS
from sluice.pipelines.text.sessions import describe_miss
from sluice.pipelines.text.types import CacheMiss, ToolChoice

CACHE_HEADER = "x-sluice-cache"
_HEADER_TEXT = re.compile(r"[A-Za-z0-9_.\[\]-]*", re.ASCII)
T = TypeVar("T")
MAX_TOOLS = 4096
"""Most tools of one request. OpenAI's limit is 128, and gateways of MCP servers send thousands."""
_SHOWN_NAMES = 20
"""Most names of tools that an error lists."""
MAX_TOOL_NAME_CHARS = 256
"""Most characters of a tool's name. Anthropic's and MCP's limit is 128, and OpenAI's 64."""
TOOL_NAME_HELP = (
    f"Of letters, digits and _ - . : /, at most {MAX_TOOL_NAME_CHARS}. A tool with another name is left out with a "
    "warning, and so are all of one name but the last."
)
_VALUES = frozenset(("const", "default", "enum", "examples", "example"))
"""Keywords whose values are no schemas, and may be null."""


def cache_miss_fields(miss: CacheMiss | None) -> dict[str, Any]:
    """Return the field `cache_miss` of a usage, where tokens of a session's prompt were computed again."""
    if miss is None:
        return {}
    fields = {name: value for name in miss.__struct_fields__ if (value := getattr(miss, name)) not in ("", None)}
    return {"cache_miss": {**fields, "message": describe_miss(miss)}}


def cache_header(miss: CacheMiss) -> str:
    """Return the header of a whole answer that tells why tokens of its prompt were computed again. A place in which the
    client chose characters that a header may not have is left out."""
    at = miss.at if _HEADER_TEXT.fullmatch(miss.at) else ""
    place = {"at": at, "character": miss.character, "token": miss.token, "missed": miss.missed_tokens}
    return "; ".join([miss.reason, *(f"{name}={value}" for name, value in place.items() if value not in ("", None))])


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


def _as_object(schema: Any) -> Any:
    """Return a boolean schema as an object: of anything, or of nothing."""
    if isinstance(schema, bool):
        return {"type": "object"} if schema else {"type": "object", "not": {}}
    return schema


ToolSchema = Annotated[dict[str, Any], BeforeValidator(_as_object), AfterValidator(_without_nulls)]
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


def written_json(text: str) -> orjson.Fragment | None:
    """Return JSON that a model wrote as a part of an answer in JSON, with the numbers, depths and halves of surrogate
    pairs that orjson has no values for; None for what is none, as where it was cut off."""
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=_refuse_constant)
        return orjson.Fragment(text)
    return None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class OfferedTools(NamedTuple):
    """The tools of a request that the model is offered, by their indices, and a note of each other one."""

    indices: Sequence[int]
    notes: tuple[str, ...] = ()

    def of(self, tools: Sequence[T]) -> list[T]:
        return [tools[index] for index in self.indices]


def offered_tools(names: Sequence[str], path: str | Sequence[str]) -> OfferedTools:
    """Return which of the tools with these names the model is offered: all but those with a name that no call can have,
    and of those with one name the last. `path` has {} for a tool's index, or is the path of each."""
    last = {name: index for index, name in enumerate(names)}
    if len(last) == len(names) and all(map(_is_callable, names)):
        return OfferedTools(range(len(names)))
    indices, notes = [], []
    for index, name in enumerate(names):
        place = path.format(index) if isinstance(path, str) else path[index]
        if not _is_callable(name):
            size = f"1 to {MAX_TOOL_NAME_CHARS} letters, digits and _ - . : /"
            notes.append(f"{place} {quote_value(name)} is left out: a call needs {size}")
        elif last[name] != index:
            notes.append(f"{place} {quote_value(name)} is left out: a later tool has the same name")
        else:
            indices.append(index)
    return OfferedTools(indices, tuple(notes))


def _is_callable(name: str) -> bool:
    return 0 < len(name) <= MAX_TOOL_NAME_CHARS and NAME_CHARS.fullmatch(name) is not None


def choose_tools(
    functions: Mapping[str, str],
    named: Mapping[str, str] | None = None,
    *,
    is_required: bool,
    is_parallel: bool = True,
    path: str = "tool_choice",
) -> ToolChoice:
    """Return the choice among tools that a protocol's field `path` makes.

    `functions` has the functions by the names that clients call them, and `named` the names of those chosen by the
    paths of their fields: empty where any may be called. Raises INVALID for a name that is no tool's, and for a choice
    among no tools.
    """
    chosen = named or {}
    if is_required or chosen:
        need_tools(functions, path)
    for place, name in chosen.items():
        if name not in functions:
            known = one_of(dict.fromkeys(functions.values()))
            raise invalid(place, f"{place} must be {known}, got {quote_value(name)}")
    return ToolChoice(is_required, is_parallel, tuple([functions[name] for name in chosen.values()]))


def need_tools(functions: Collection[str], path: str = "tool_choice") -> None:
    """Raise INVALID for a choice, in the field `path`, among no functions."""
    if not functions:
        raise invalid(path, f"{path} must be 'none' or 'auto' without tools; send tools")


def one_of(names: Collection[str]) -> str:
    """Return "one of" names of tools, the first of many, for an error."""
    return f"one of {', '.join(islice(names, _SHOWN_NAMES))}{', ...' if len(names) > _SHOWN_NAMES else ''}"


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
