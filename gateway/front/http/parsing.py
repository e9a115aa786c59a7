"""From a JSON body to a checked value, or to one sentence that says what is wrong; and fields that routes share.

Fields of OpenAI's and vLLM's APIs that would change the answer and that Sluice does not have are refused: ignoring one
would silently give another answer than the client asked for. A value that changes nothing is accepted; null always is.
"""

import json
import re
from codecs import BOM_UTF8
from collections.abc import AsyncIterable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import lru_cache, partial
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import orjson
from fastapi import Request
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from sluice.engine.guidance.closing import rewrite
from sluice.engine.guidance.rewriting import Note
from sluice.engine.guidance.schema import parse_schema
from sluice.engine.guidance.translate import MAX_BYTES
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.front.http.errors import requirement
from sluice.gateway.front.http.json_pieces import INLINE_BYTES, Document, DocumentError, DocumentLimits
from sluice.gateway.front.http.request import read_pieces
from sluice.gateway.front.long_work import run_aside
from sluice.gateway.options.http import HttpOptions

RequestT = TypeVar("RequestT", bound=BaseModel)
REQUEST_LIMITS = DocumentLimits(values=(1 << 20) + (1 << 16), members=1 << 17, strings=1 << 17, string_chars=1 << 24)
"""A prompt of token ids has up to 2**20 values, and thousands of tools have some 2**16 members and strings. No context
takes 2**24 characters."""
_BATCH_BYTES = 256 << 10
"""Bytes of a body that are parsed at once while the rest arrives."""
MAX_FIELDS = 1024
"""Most fields of a long body: looking at an unknown one takes a microsecond."""
MAX_MESSAGES = 10_000
"""Most messages of a conversation: checking one takes 4 us, in one call that holds the interpreter's lock."""
MAX_LIST = 4096
"""Most elements of lists of strings and token ids that are no prompt. What checks them may allow fewer."""
_SHOWN_CHARS, _NOTE_CHARS = 60, 200
_LIST_CHARS = 1000
"""Most characters of names of one kind in a header: proxies refuse answers with more than 4 or 8 KiB of headers, and
characters outside ASCII take up to ten each."""
_NAMED_RELAXATIONS = 10
_WARNED_FIELDS = 10
_TELLING = re.compile(
    r'"(?:contains|dependen|format|if|m(?:ax|in)Properties|not|oneOf|pattern|propertyNames|required"\s*:\s*[tf]'
    r"|unevaluated|uniqueItems|\$dynamicRef|\$recursiveRef)"
)
"""Matches the beginnings of keywords in a schema to which answers are perhaps not held."""
_MEDIA_ERROR = "media"
MEDIA_PARTS = {
    *("image_url", "input_image", "image", "video_url", "video"),
    *("input_audio", "audio_url", "audio", "input_file", "file", "document"),
}
"""Types of parts of a message that are no text, in the words of OpenAI, vLLM and Anthropic."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    # of the other route, or of several answers
    "echo": (False,),
    "top_logprobs": (0,),
    # what the answer is
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    # tools
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    # constraints on tokens
    "logits_processors": ([],),
    # the prompt
    # a message's
    "messages.tool_calls": ([],),
    "messages.tool_call_id": (),
    "messages.function_call": (),
    # vLLM's
    "prompt_embeds": (),
    "logprob_token_ids": (),
    "repetition_detection": (),
    "thinking_token_budget": (-1,),
    "watermarking": (False,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "normalize": (True,),
    # Ollama's
    "template": ("",),
    "options.mirostat": (0,),
    "options.thinking_token_budget": (-1,),
    "options.tfs_z": (1, 1.0),
    "options.penalize_newline": (True,),
}
"""Unsupported fields, and for each the values that change nothing."""


_NEUTRAL_ELSEWHERE = {"n": 1, "best_of": 1, "beam_width": 1} | dict.fromkeys(
    ("logprobs", "use_beam_search", "return_token_ids", "return_tokens_as_token_ids"), False
)
"""Values that change nothing, by field, of those that a schema declares as refused."""


def parse_body(
    schema: type[RequestT], body: bytes, is_strict: bool, limits: DocumentLimits = REQUEST_LIMITS
) -> tuple[RequestT, list[str]]:
    """Return the request in `body`, and the paths of its unknown fields. Call it on a thread where the body is long.

    A byte order mark is skipped, as many editors and Windows' tools write one.
    Raises INVALID for the first thing that is wrong: bad JSON, a wrong type, a field that is not supported or, when
    `is_strict`, an unknown field; in a long body also for more values than `limits` allow, or too many fields.
    """
    body = body.removeprefix(BOM_UTF8)
    if len(body) <= INLINE_BYTES:
        return _check_request(lambda: schema.model_validate_json(body), is_strict)
    return _finish(Document(limits), body, schema, is_strict)


async def read_body(request: Request, schema: type[RequestT], options: HttpOptions) -> tuple[RequestT, list[str]]:
    """Read and parse the body as it arrives. Returns its fields, and the names of those that the schema lacks."""
    async with aclosing(read_pieces(request, options.max_input_bytes)) as pieces:
        return await parse_pieces_of_body(schema, pieces, options.is_strict)


async def parse_pieces_of_body(
    schema: type[RequestT], pieces: AsyncIterable[bytes], is_strict: bool
) -> tuple[RequestT, list[str]]:
    """Return and raise as `parse_body` for a body that arrives in pieces: what has arrived is parsed, not kept."""
    arrived, document = bytearray(), None
    async for piece in pieces:
        arrived += piece
        if len(arrived) > _BATCH_BYTES:
            document = document or _begin_document(arrived, schema)
            batch, arrived = arrived, bytearray()
            await run_aside(partial(_feed, document, batch))
    if document is None and len(arrived) <= INLINE_BYTES:
        return parse_body(schema, bytes(arrived), is_strict)
    return await run_aside(partial(_finish, document or _begin_document(arrived, schema), arrived, schema, is_strict))


def _begin_document(arrived: bytearray, schema: type[BaseModel]) -> Document:
    """Return the document of a body that has begun to arrive, without its byte order mark."""
    if arrived.startswith(BOM_UTF8):
        del arrived[: len(BOM_UTF8)]
    return Document(getattr(schema, "document_limits", REQUEST_LIMITS))


def _feed(document: Document, body: bytes | bytearray) -> None:
    try:
        document.feed(body)
    except DocumentError as error:
        raise SluiceError(ErrorCode.INVALID, f"the request body {error}") from None


def _finish(
    document: Document, rest: bytes | bytearray, schema: type[RequestT], is_strict: bool
) -> tuple[RequestT, list[str]]:
    """Parse the rest of `document`, and check it."""
    _feed(document, rest)
    try:
        values = document.finish()
    except DocumentError as error:
        raise SluiceError(ErrorCode.INVALID, f"the request body {error}") from None
    if isinstance(values, dict) and len(values) > MAX_FIELDS:
        message = f"the request body has {len(values)} fields; at most {MAX_FIELDS} are read"
        raise SluiceError(ErrorCode.INVALID, message)
    return _check_request(lambda: schema.model_validate(values), is_strict)


def _check_request(validate: Callable[[], RequestT], is_strict: bool) -> tuple[RequestT, list[str]]:
    try:
        request = validate()
    except ValidationError as error:
        raise _as_invalid(error.errors(include_url=False)[0]) from None
    ignored = []
    for name, path, value in _undeclared(request):
        if name not in NEUTRAL_VALUES:
            ignored.append(path)
        elif not is_neutral(name, value):
            raise _unsupported(name, path, value)
    if ignored and is_strict:
        message = f"unknown field {quote_name(ignored[0])}; this server refuses what it does not know"
        raise _invalid(ignored[0], message, "unknown_parameter")
    return request, ignored


def relaxed_parts(grammar: Grammar) -> list[str]:
    """Return the first of what a JSON schema says and answers are not held to."""
    return [str(note) for note in schema_notes(grammar)[:_NAMED_RELAXATIONS]]


def schema_notes(grammar: Grammar) -> Sequence[Note]:
    """Return all that a JSON schema says and answers are not held to. The engine refuses what is no schema."""
    is_long = len(grammar.text) > MAX_BYTES[GrammarKind.JSON_SCHEMA]
    if grammar.kind is not GrammarKind.JSON_SCHEMA or is_long or not _TELLING.search(grammar.text):
        return ()
    return _notes_of(grammar.text)


@lru_cache(16)
def _notes_of(schema: str) -> Sequence[Note]:
    with suppress(SluiceError):
        return rewrite(parse_schema(schema)).notes
    return ()


def warning_header(
    ignored: Sequence[str],
    relaxed: Sequence[str] = (),
    without_effect: Sequence[str] = (),
    adapted: Sequence[str] = (),
) -> dict[str, str]:
    """Return the response header that tells a client which of its fields were unknown or had no effect, what of its
    JSON schema was `relaxed`, and what of its conversation and tools was `adapted`."""
    kinds = {
        "ignored unknown fields": (ignored, _SHOWN_CHARS),
        "fields without effect here": (without_effect, _SHOWN_CHARS),
        "relaxed in the JSON schema": (relaxed, _NOTE_CHARS),
        "adapted": (adapted, _NOTE_CHARS),
    }
    warnings = [f"{kind}: {_list(*each)}" for kind, each in kinds.items() if each[0]]
    return {"x-sluice-warning": "; ".join(warnings)} if warnings else {}


def refuse_without_effect(names: Sequence[str], adapted: Sequence[str] = ()) -> None:
    """Raise INVALID for the first of the fields that have no effect here, or of those that would be read otherwise than
    they were sent, as a strict server does."""
    if names:
        raise invalid(
            names[0].partition(" ")[0], f"{quote_name(names[0])} has no effect here; this server refuses such fields"
        )
    if adapted:
        message = f"{quote_name(adapted[0], _NOTE_CHARS)}; this server refuses such fields"
        raise invalid(adapted[0].partition(" ")[0], message)


def _list(names: Sequence[str], most_chars: int) -> str:
    shown, room = list[str](), _LIST_CHARS
    for name in names[:_WARNED_FIELDS]:
        quoted = quote_name(name, most_chars)
        if shown and len(quoted) > room:
            break
        shown.append(_cut(quoted, room))
        room -= len(quoted)
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return ", ".join(shown) + more


def quote_name(name: str, most_chars: int = _SHOWN_CHARS) -> str:
    """Return a name that the client made up, cut and in ASCII without control characters, as a header needs it."""
    return _cut(name, most_chars).encode("unicode_escape").decode("ascii")


def quote_value(value: Any) -> str:
    """Return `value` as an error message quotes it: as JSON, cut; of a container only its kind."""
    if isinstance(value, list):
        return f"an array of {len(value)}"
    if isinstance(value, dict):
        return "an object"
    text = _cut(value) if isinstance(value, str) else value
    return _cut(json.dumps(text, ensure_ascii=False))


def _cut(text: str, most_chars: int = _SHOWN_CHARS) -> str:
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."


def _undeclared(value: BaseModel, name_prefix: str = "", path_prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield (`messages.audio`, `messages[0].audio`, value) for every field that is not null and not declared."""
    for name, extra in (value.model_extra or {}).items():
        if extra is not None:
            yield name_prefix + name, path_prefix + name, extra
    for name, field in value:
        if isinstance(field, BaseModel):
            yield from _undeclared(field, f"{name_prefix}{name}.", f"{path_prefix}{name}.")
        elif isinstance(field, list) and field and isinstance(field[0], BaseModel):
            for index, item in enumerate(field):
                yield from _undeclared(item, f"{name_prefix}{name}.", f"{path_prefix}{name}[{index}].")


def is_neutral(name: str, value: Any) -> bool:
    """Whether `value` of `name`, one of NEUTRAL_VALUES, changes nothing."""
    return any(type(value) is type(neutral) and value == neutral for neutral in NEUTRAL_VALUES[name])


def _unsupported(name: str, path: str, value: Any) -> SluiceError:
    neutral = NEUTRAL_VALUES[name]
    remedy = f"leave it out or send {' or '.join(json.dumps(one) for one in neutral)}" if neutral else "leave it out"
    message = f"{path} is not supported, got {quote_value(value)}; {remedy}"
    return _invalid(path, message, "unsupported_parameter")


def refuse_foreign(fields: BaseModel) -> None:
    """Raise INVALID for a field of other routes, whose description begins with "Refused", unless it changes nothing."""
    for name, declared in type(fields).model_fields.items():
        if name in fields.model_fields_set and (reason := declared.description or "").startswith("Refused"):
            value, neutral = getattr(fields, name), _NEUTRAL_ELSEWHERE.get(name)
            if value is not None and (value != neutral or type(value) is not type(neutral)):
                raise invalid(name, f"{name} is refused{reason.removeprefix('Refused').rstrip('.')}")


def _as_invalid(error: ErrorDetails) -> SluiceError:
    """Translate one of pydantic's errors: the field, the allowed values, the value that came."""
    kind, value = error["type"], error["input"]
    if kind == "json_invalid":
        return SluiceError(ErrorCode.INVALID, f"the request body is not valid JSON: {error['ctx']['error']}")
    path = _path(error["loc"])
    if not path:
        return SluiceError(ErrorCode.INVALID, f"the request body must be a JSON object, got {quote_value(value)}")
    if kind == "missing":
        return _invalid(path, f"{path} is required", "missing_required_parameter")
    if kind == _MEDIA_ERROR:
        return _media_refusal(path + (error["msg"] and f".{error['msg']}"))
    if kind in ("too_short", "string_too_short"):
        return invalid(path, f"{path} must not be empty")
    if kind == "string_too_long":
        return invalid(path, f"{path} must have at most {error['ctx']['max_length']} characters, got {len(value)}")
    if kind == "too_long":
        return invalid(path, f"{path} must have at most {error['ctx']['max_length']} elements, got {len(value)}")
    code = "invalid_type" if kind.endswith("_type") else None
    return _invalid(path, f"{path} {requirement(error)}, got {quote_value(value)}", code)


def _invalid(param: str, message: str, openai_code: str | None) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message, param=param, openai_code=openai_code)


def _path(location: tuple[int | str, ...]) -> str:
    """Return `messages[0].content` for pydantic's ("messages", 0, "content", "<list>")."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not is_tag(part):
            path += f".{part}" if path else part
    return path


def is_tag(part: str | int) -> bool:
    """Whether a part of an error's location is the name of a union's member, not of a field."""
    return isinstance(part, str) and part.startswith("<")


def text_or_object(value: Any) -> str | None:
    """Return the member of a union of a string and an object that the value belongs to."""
    if isinstance(value, str):
        return "<text>"
    return "<object>" if isinstance(value, dict) else None


def text_or_list(value: Any) -> str | None:
    """Return the member of a union of a string and an array that the value belongs to."""
    if isinstance(value, str):
        return "<text>"
    return "<list>" if isinstance(value, list) else None


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


WholeNumber = Annotated[int, BeforeValidator(_whole)]
"""An integer, which JSON may write as 1.0: so do clients whose language has one type of numbers."""


def union_error(what: str) -> dict[str, str]:
    """Return a union's settings for the error about a value that is none of its members."""
    return {"custom_error_type": "expected", "custom_error_message": f"Input should be {what}"}


def media_refusal(path: str, kind: str, part: Mapping[str, Any]) -> SluiceError:
    """Return the refusal of a part of a message, an image, a sound or a file, at a path."""
    return _media_refusal(".".join(filter(None, (path, _media_field(kind, part)))))


def _media_refusal(path: str) -> SluiceError:
    return invalid(path, f"{path} is not supported: models take text, and some take images in the user's messages")


def _media_field(kind: str, part: Mapping[str, Any]) -> str:
    """Return the field of a part that has its content; "" where there is none."""
    return next((name for name in (kind, "source") if name in part), "")


def refuse_media_part(value: Any) -> Any:
    """Return a part of a message's content. Raises a validator's error for an image, a sound or a file."""
    kind = value.get("type") if isinstance(value, dict) else None
    if isinstance(kind, str) and kind in MEDIA_PARTS:
        raise PydanticCustomError(_MEDIA_ERROR, "{field}", {"field": _media_field(kind, value)})
    return value


class RequestObject(BaseModel):
    """A JSON object. Fields that it does not declare are kept, for `parse_body` to judge.

    The body of a route has an `example`, as JSON, which can be sent as it is from /docs.
    """

    example: ClassVar[str] = "{}"
    document_limits: ClassVar[DocumentLimits] = REQUEST_LIMITS
    """The most of a long body."""
    model_config = ConfigDict(strict=True, extra="allow", frozen=True, allow_inf_nan=False)


StopStrings = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[str], Field(fail_fast=True, max_length=MAX_LIST), Tag("<list>")],
    Discriminator(text_or_list, **union_error("a string or an array of strings")),
]


class TextPart(RequestObject):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


_Part = Annotated[TextPart, BeforeValidator(refuse_media_part)]
Content = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[list[_Part], Field(min_length=1, fail_fast=True), Tag("<list>")],
    Discriminator(text_or_list, **union_error('a string or an array of {"type": "text", "text": ...} parts')),
]


class Message(RequestObject):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    def text(self) -> str:
        return join_text(self.content)


def join_text(content: str | Sequence[TextPart]) -> str:
    """Return the text of a content, in one part or in several."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


def retriever_parameters(
    collection: str | None,
    top_k: int | None,
    mode: str | None,
    filter: dict[str, Any] | None,
) -> dict[str, str | int | float | bool]:
    """Return the request parameters of a retrieving step. `filter` has been checked."""
    parameters = {
        "collection": collection,
        "top_k": top_k,
        "mode": mode,
        "filter": orjson.dumps(filter).decode() if filter else None,
    }
    return {name: value for name, value in parameters.items() if value is not None}
