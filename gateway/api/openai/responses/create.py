"""From the fields of `POST /v1/responses` to a prompt, a text request, and the object that the answer goes into."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import msgspec
import orjson
from pydantic import BaseModel

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.openai.reply import ReplyOptions
from sluice.gateway.api.openai.requests import effort_arguments, parse_generation
from sluice.gateway.api.openai.responses.archive import Archive
from sluice.gateway.api.openai.responses.items import CALL_OUTPUTS, CALLS, ItemIds, JsonObject, store_item, to_messages
from sluice.gateway.api.openai.responses.schemas import (
    ConversationReference,
    CreateResponseRequest,
    InputItem,
    ItemReference,
    MessageItem,
    PromptFields,
    ResponseTool,
    TextFormat,
)
from sluice.gateway.api.openai.responses.tools import parse_tool_choice, prompt_tools
from sluice.gateway.api.openai.schemas import JsonSchema, ResponseFormat
from sluice.gateway.front.http.parsing import refuse_foreign
from sluice.pipelines.text.model import TextModel, refuse_images
from sluice.pipelines.text.types import ChatMessage, Conversation, EncodedPrompt, Prompt, TemplateOptions, TextRequest

T = TypeVar("T")
PROTOCOL = "openai_responses"
PARAM_NAMES = {"query": "input", "messages": "input", "max_tokens": "max_output_tokens"}
"""The client's names of fields that models name otherwise in their errors."""
_LOGPROBS = "message.output_text.logprobs"
_ITEMS_PER_TURN = 256
"""Items that are stored in one turn of the event loop: one takes some microseconds, and there may be thousands."""


@dataclass(frozen=True, slots=True)
class PromptItems:
    """The items of a prompt in their stored form: those of earlier turns, and the new ones."""

    earlier: list[JsonObject]
    new: list[JsonObject]
    conversation_id: str | None = None
    session: str = ""
    """The conversation, or what the responses of one chain have in common; "" for a first response."""

    @property
    def all(self) -> list[JsonObject]:
        return [*self.earlier, *self.new]


async def gather_items(archive: Archive | None, owner: str, fields: PromptFields, ids: ItemIds) -> PromptItems:
    """Read what the new items follow, and give them ids. Raises INVALID, and NOT_FOUND for what is not stored."""
    if fields.conversation is not None and fields.previous_response_id is not None:
        message = "previous_response_id and conversation both say what comes before the input; send one of them"
        raise invalid("previous_response_id", message)
    conversation_id = _conversation_id(fields)
    earlier: list[JsonObject] = []
    session = conversation_id or ""
    if conversation_id is not None:
        kept = await need_archive(archive, "conversation").conversation(owner, conversation_id, "conversation")
        earlier = kept.items
    elif fields.previous_response_id is not None:
        earlier, session = await _earlier_turns(
            need_archive(archive, "previous_response_id"), owner, fields.previous_response_id
        )
    sent = fields.input or ()
    if isinstance(sent, str):
        sent = [MessageItem.model_validate({"role": "user", "content": sent})]
    new = await store_items(archive, owner, sent, ids, "input", earlier)
    if not earlier and not new:
        raise invalid("input", "input must not be empty: there is no earlier turn to answer")
    return PromptItems(earlier, new, conversation_id, session)


def _conversation_id(fields: PromptFields) -> str | None:
    sent = fields.conversation
    return sent.id if isinstance(sent, ConversationReference) else sent


async def _earlier_turns(archive: Archive, owner: str, response_id: str) -> tuple[list[JsonObject], str]:
    """Return the items up to a response, and the session of its chain."""
    param = "previous_response_id"
    found = await archive.find(owner, response_id, param)
    if not found.is_final:
        status = found.response["status"]
        raise invalid(param, f"{param} must be a response that is complete, and {response_id} is {status}")
    items = [*found.stored.items(), *found.response["output"]]
    return items, found.stored.session or response_id.removeprefix("resp_")


def need_archive(archive: Archive | None, param: str) -> Archive:
    """Return the archive. Raises INVALID where the server keeps nothing."""
    if archive is None:
        raise invalid(param, f"{param} needs stored responses, and this server stores none (--responses-store none)")
    return archive


async def store_items(
    archive: Archive | None,
    owner: str,
    items: Sequence[InputItem],
    ids: ItemIds,
    path: str,
    earlier: Sequence[JsonObject] = (),
) -> list[JsonObject]:
    """Return items in their stored form, with the items that references mean. `path` is the field that they came in."""
    stored = []
    for index, item in enumerate(items):
        if index % _ITEMS_PER_TURN == _ITEMS_PER_TURN - 1:
            await asyncio.sleep(0)
        if isinstance(item, ItemReference):
            stored.append(await _referred_item(archive, owner, item.id, f"{path}[{index}]", earlier))
        else:
            stored.append(store_item(item, ids))
    return stored


async def _referred_item(
    archive: Archive | None, owner: str, item_id: str, path: str, earlier: Sequence[JsonObject]
) -> JsonObject:
    found = next((item for item in earlier if item["id"] == item_id), None)
    found = found or await need_archive(archive, path).find_item(owner, item_id)
    if found is None:
        message = f"{path}.id {item_id!r} not found: no stored response of yours has such an item"
        raise SluiceError(ErrorCode.NOT_FOUND, message, param=f"{path}.id")
    return found


def conversation_of(fields: PromptFields, items: Sequence[JsonObject]) -> Conversation:
    """Return the prompt of items. Raises INVALID for what this server cannot do."""
    instructions = [ChatMessage("system", fields.instructions)] if fields.instructions else []
    arguments = effort_arguments(_effort(fields))
    if fields.text is not None and fields.text.verbosity is not None:
        arguments["verbosity"] = fields.text.verbosity
    options = TemplateOptions(tools=prompt_tools(fields), arguments=arguments)
    num_new = len(fields.input) if isinstance(fields.input, list) else 1
    return Conversation((*instructions, *to_messages(items, len(items) - num_new)), options)


def _effort(fields: PromptFields) -> str | None:
    return None if fields.reasoning is None else fields.reasoning.effort


def template_fields_without_effect(fields: PromptFields, model: TextModel) -> list[str]:
    """Return the paths of the fields that the model's chat template does not use."""
    is_verbosity = fields.text is not None and fields.text.verbosity is not None
    verbosity = ["text.verbosity"] if is_verbosity and "verbosity" not in model.template_names else []
    effort = effort_arguments(_effort(fields))
    return [*verbosity, *(["reasoning.effort"] if effort and model.template_names.isdisjoint(effort) else [])]


async def fit_prompt(fields: CreateResponseRequest, items: Sequence[JsonObject], model: TextModel) -> Prompt:
    """Return the prompt of items: where `truncation` is auto without as many of the oldest as do not fit into the
    model's context. Instructions, the last question and what follows it are never dropped."""
    limit = model.max_model_len
    if fields.truncation != "auto" or limit is None:
        return conversation_of(fields, items)
    refuse_images(conversation_of(fields, items), " where truncation is auto")
    droppable = _droppable(items)
    room = limit - (fields.max_output_tokens or 1)
    fewest, most = max(0, len(droppable) - limit), len(droppable)  # each item takes a token at least
    fitting: Prompt | None = None
    while fewest < most:
        middle = (fewest + most) // 2
        prompt = await _prepare(model, conversation_of(fields, _without(items, droppable[:middle])), room)
        fewest, most, fitting = (middle + 1, most, fitting) if prompt is None else (fewest, middle, prompt)
    return fitting or conversation_of(fields, _without(items, droppable[:most]))


def _droppable(items: Sequence[JsonObject]) -> list[int]:
    """Return the places of the items before the last question that do not instruct the model, oldest first."""
    questions = [place for place, item in enumerate(items) if item.get("role") == "user"]
    end = questions[-1] if questions else len(items) - 1
    return [place for place in range(end) if items[place].get("role") not in ("system", "developer")]


def _without(items: Sequence[JsonObject], places: Sequence[int]) -> list[JsonObject]:
    """Return the items but for those at `places`, and for the outputs of calls that are not left."""
    dropped = set(places)
    kept = [item for place, item in enumerate(items) if place not in dropped]
    lost = {items[place]["call_id"] for place in places if items[place]["type"] in CALLS}
    return [item for item in kept if item["type"] not in CALL_OUTPUTS or item["call_id"] not in lost]


async def _prepare(model: TextModel, conversation: Conversation, room: int) -> Prompt | None:
    """Return the prompt with its token ids; None where it takes more than `room` tokens."""
    try:
        prompt = await model.prepare_shared(conversation)
    except SluiceError as error:
        if error.code is ErrorCode.INVALID:  # a text may be too long to be tokenized at all
            return None
        raise
    return None if isinstance(prompt, EncodedPrompt) and len(prompt.token_ids) > room else prompt


def check_fields(fields: CreateResponseRequest, archive: Archive | None) -> None:
    """Raise INVALID for fields of other routes, and for those that contradict each other."""
    refuse_foreign(fields)
    if fields.background and fields.store is False:
        raise invalid("background", "background must be false where store is false: nothing would keep the response")
    if fields.background:
        need_archive(archive, "background")


def parse_request(fields: CreateResponseRequest, base: TextRequest, prompt: Prompt) -> tuple[TextRequest, ReplyOptions]:
    """Return the request for the text, and what the client wants in the answer. `base` has what every route reads
    alike: id, protocol and scheduling."""
    form = None if fields.text is None or fields.text.format is None else _response_format(fields.text.format)
    logprobs = (fields.top_logprobs or 0) if fields.top_logprobs or _LOGPROBS in (fields.include or ()) else None
    shared = fields.model_copy(update={"response_format": form, "stream_options": None})
    [request], options = parse_generation(
        shared, base, [""], max_tokens=fields.max_output_tokens, logprobs=logprobs, param_names=PARAM_NAMES
    )
    request = msgspec.structs.replace(request, prompt=prompt, tool_choice=parse_tool_choice(fields))
    names = dict(options.param_names)
    if form is not None and "grammar" in names:
        names["grammar"] = "text.format.schema" if form.json_schema is not None else "text.format"
    return request, replace(options, param_names=names)


def _response_format(sent: TextFormat) -> ResponseFormat:
    """Return the form of the text as chat completions have it."""
    if sent.type != "json_schema":
        return ResponseFormat(type=sent.type)
    if sent.schema_ is None:
        path = "text.format.schema"
        raise invalid(path, f"{path} is required where text.format.type is json_schema")
    return ResponseFormat(type=sent.type, json_schema=JsonSchema(name="", schema=sent.schema_, strict=sent.strict))


def response_object(
    response_id: str, fields: CreateResponseRequest, model: str, service_tier: str | None, began_at: float
) -> JsonObject:
    """Return the response before it is generated. `began_at` is in seconds since 1970."""
    text = _as_sent(fields.text) or {}
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(began_at),
        "completed_at": None,
        "status": "in_progress",
        "background": bool(fields.background),
        "error": None,
        "incomplete_details": None,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "model": model,
        "output": [],
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "previous_response_id": fields.previous_response_id,
        "conversation": None if fields.conversation is None else {"id": _conversation_id(fields)},
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": _effort(fields), "summary": None},
        "safety_identifier": fields.safety_identifier,
        "service_tier": service_tier or "default",
        "store": fields.store is not False,
        "temperature": fields.temperature,
        "text": _echoed("text", {"format": {"type": "text"}, **text}),
        "tool_choice": _as_sent(fields.tool_choice) or "auto",
        "tools": _echoed("tools", [_tool_object(tool) for tool in fields.tools or ()]),
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": fields.top_p,
        "truncation": fields.truncation or "disabled",
        "usage": None,
        "user": fields.user,
        "metadata": fields.metadata or {},
    }


def _tool_object(tool: BaseModel) -> JsonObject:
    return {**({"strict": True} if isinstance(tool, ResponseTool) else {}), **_as_sent(tool)}


def _as_sent(value: BaseModel | str | None) -> Any:
    return value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, BaseModel) else value


def _echoed(param: str, value: T) -> T:
    """Return what the answer repeats. Raises INVALID for what it cannot: clients may send integers of any length."""
    try:
        orjson.dumps(value)
    except TypeError as error:
        raise invalid(param, f"{param} cannot be repeated in the answer: {error}") from None
    return value
