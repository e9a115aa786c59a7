"""From the items of a response's input to its prompt: what they follow, and what of it fits."""

import asyncio
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.openai.requests import effort_arguments
from sluice.gateway.api.openai.responses.archive import Archive, PromptItems
from sluice.gateway.api.openai.responses.history import read_history
from sluice.gateway.api.openai.responses.items import CALL_OUTPUTS, CALLS, ItemIds, JsonObject, store_item
from sluice.gateway.api.openai.responses.schemas import (
    ConversationReference,
    CreateResponseRequest,
    InputItem,
    ItemReference,
    MessageItem,
    PromptFields,
)
from sluice.gateway.api.openai.responses.tools import (
    DeclaredTools,
    declared_tools,
    left_out_tools,
    prompt_tools,
)
from sluice.pipelines.text.model import TextModel, refuse_images
from sluice.pipelines.text.types import ChatMessage, Conversation, EncodedPrompt, Prompt, PromptForm, TemplateOptions

_ITEMS_PER_TURN = 256
"""Items that are stored in one turn of the event loop: one takes some microseconds, and there may be thousands."""


class EarlierTurns(NamedTuple):
    """The items up to a response and its own, and the session of its chain."""

    items: list[JsonObject]
    session: str


_NO_TURNS: Mapping[str, EarlierTurns] = MappingProxyType({})


async def gather_items(
    archive: Archive | None,
    owner: str,
    fields: PromptFields,
    ids: ItemIds,
    memory: Mapping[str, EarlierTurns] = _NO_TURNS,
) -> PromptItems:
    """Read what the new items follow, and give them ids. Raises INVALID, and NOT_FOUND for what is not stored. The
    `memory` has responses, by their ids, that the archive is not asked for."""
    if fields.conversation is not None and fields.previous_response_id is not None:
        message = "previous_response_id and conversation both say what comes before the input; send one of them"
        raise invalid("previous_response_id", message)
    conversation_id = conversation_id_of(fields)
    earlier: list[JsonObject] = []
    session = conversation_id or ""
    if conversation_id is not None:
        kept = await need_archive(archive, "conversation").conversation(owner, conversation_id, "conversation")
        earlier = kept.items
    elif fields.previous_response_id is not None:
        earlier, session = memory.get(fields.previous_response_id) or await _earlier_turns(
            need_archive(archive, "previous_response_id"), owner, fields.previous_response_id
        )
    sent = fields.input or ()
    if isinstance(sent, str):
        sent = [MessageItem.model_validate({"role": "user", "content": sent})]
    new = await store_items(archive, owner, sent, ids, "input", earlier)
    if not earlier and not new:
        raise invalid("input", "input must not be empty: there is no earlier turn to answer")
    return PromptItems(earlier, new, conversation_id, session)


def conversation_id_of(fields: PromptFields) -> str | None:
    sent = fields.conversation
    return sent.id if isinstance(sent, ConversationReference) else sent


async def _earlier_turns(archive: Archive, owner: str, response_id: str) -> EarlierTurns:
    param = "previous_response_id"
    found = await archive.find(owner, response_id, param)
    if not found.is_final:
        status = found.response["status"]
        raise invalid(param, f"{param} must be a response that is complete, and {response_id} is {status}")
    items = [*found.stored.items(), *found.response["output"]]
    return EarlierTurns(items, found.stored.session or response_id.removeprefix("resp_"))


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
            stored.append(store_item(item, ids, f"{path}[{index}]"))
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


class ResponsePrompt(NamedTuple):
    """The prompt of a response, the tools that it shows, and the paths of the items that it has nothing of."""

    prompt: Prompt
    tools: DeclaredTools
    left_out: list[str]


def conversation_of(
    fields: PromptFields, items: Sequence[JsonObject], tools: DeclaredTools, *, has_result_images: bool = True
) -> tuple[Conversation, list[str]]:
    """Return the prompt of items, and the paths of those that it has nothing of. Raises INVALID for what this server
    cannot do."""
    instructions = [ChatMessage("system", fields.instructions)] if fields.instructions else []
    arguments = effort_arguments(effort_of(fields))
    if fields.text is not None and fields.text.verbosity is not None:
        arguments["verbosity"] = fields.text.verbosity
    options = TemplateOptions(tools=prompt_tools(fields, tools), arguments=arguments)
    num_new = len(fields.input) if isinstance(fields.input, list) else 1
    history = read_history(items, len(items) - num_new, has_result_images=has_result_images)
    messages = (*instructions, *history.messages)
    return Conversation(messages, options, left_out_tools(fields)), history.left_out


async def make_prompt(
    fields: PromptFields, items: Sequence[JsonObject], model: TextModel, limit: int
) -> ResponsePrompt:
    """Return the prompt of items: where `truncation` is auto without as many of the oldest as do not fit into the
    model's context besides `limit` tokens. Instructions, the last question and the last results are never dropped, and
    what a model cannot take of the images that tools returned is left out."""
    tools = declared_tools(fields, items)
    if fields.truncation == "auto" and model.max_model_len is not None:
        return await _fit(fields, items, model, tools, model.max_model_len - limit)
    prompt, left_out = conversation_of(fields, items, tools)
    if not any(".output[" in image.path for image in prompt.images):
        return ResponsePrompt(prompt, tools, left_out)
    if not model.max_images:
        return ResponsePrompt(*_without_result_images(fields, items, tools))
    try:
        return ResponsePrompt(await model.prepare_shared(prompt, prompt_form(fields)), tools, left_out)
    except SluiceError as error:
        if error.code is not ErrorCode.INVALID or error.param not in {image.path for image in prompt.images}:
            raise
    return ResponsePrompt(*_without_result_images(fields, items, tools))


def prompt_form(fields: PromptFields) -> PromptForm:
    """Return the form of a prompt. One that is only counted has no salt."""
    return PromptForm(salt=(isinstance(fields, CreateResponseRequest) and fields.cache_salt) or "")


def _without_result_images(
    fields: PromptFields, items: Sequence[JsonObject], tools: DeclaredTools
) -> tuple[Conversation, DeclaredTools, list[str]]:
    prompt, left_out = conversation_of(fields, items, tools, has_result_images=False)
    return prompt, tools, left_out


async def _fit(
    fields: PromptFields, items: Sequence[JsonObject], model: TextModel, tools: DeclaredTools, room: int
) -> ResponsePrompt:
    whole, _, left_out = _without_result_images(fields, items, tools)
    refuse_images(model.adapt(whole), " where truncation is auto")
    form = prompt_form(fields)
    fitting = await _prepare(model, whole, room, form)
    if fitting is not None:
        return ResponsePrompt(fitting, tools, left_out)
    droppable = _droppable(items)
    fewest, most = min(1, len(droppable)), len(droppable)
    while fewest < most:
        middle = (fewest + most) // 2
        shorter = _without_result_images(fields, _without(items, droppable[:middle]), tools)[0]
        prompt = await _prepare(model, shorter, room, form)
        fewest, most, fitting = (middle + 1, most, fitting) if prompt is None else (fewest, middle, prompt)
    rest = _without_result_images(fields, _without(items, droppable[:most]), tools)
    return ResponsePrompt(fitting or rest[0], tools, left_out)


def _droppable(items: Sequence[JsonObject]) -> list[int]:
    """Return the places of the items that may be dropped, oldest first: those before the last question, and then what
    was done since, but for the last results and the calls that they are of. Instructions are none of them."""
    questions = [place for place, item in enumerate(items) if item.get("role") == "user"]
    last = questions[-1] if questions else -1
    return [
        place
        for place in range(_last_step(items, last + 1))
        if place != last and items[place].get("role") not in ("system", "developer")
    ]


def _last_step(items: Sequence[JsonObject], start: int) -> int:
    """Return the place, at least `start`, of the first of the calls whose results are last, or of the last item."""
    place = len(items)
    while place > start and items[place - 1]["type"] in CALL_OUTPUTS:
        place -= 1
    if place == len(items):
        return max(start, place - 1)
    while place > start and items[place - 1]["type"] in CALLS:
        place -= 1
    return place


def _without(items: Sequence[JsonObject], places: Sequence[int]) -> list[JsonObject]:
    """Return the items but for those at `places`, and for the outputs of calls that are not left."""
    dropped = set(places)
    kept = [item for place, item in enumerate(items) if place not in dropped]
    lost = {items[place].get("call_id") for place in places if items[place]["type"] in CALLS}
    return [item for item in kept if item["type"] not in CALL_OUTPUTS or item.get("call_id") not in lost]


async def _prepare(model: TextModel, conversation: Conversation, room: int, form: PromptForm) -> Prompt | None:
    """Return the prompt with its token ids; None where it takes more than `room` tokens."""
    try:
        prompt = await model.prepare_shared(model.adapt(conversation), form)
    except SluiceError as error:
        if error.code is ErrorCode.INVALID:  # a text may be too long to be tokenized at all
            return None
        raise
    return None if isinstance(prompt, EncodedPrompt) and len(prompt.token_ids) > room else prompt


def effort_of(fields: PromptFields) -> str | None:
    return None if fields.reasoning is None else fields.reasoning.effort
