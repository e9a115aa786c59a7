"""From the items of a response's input to its prompt: what they follow, and what of it fits."""

import asyncio
from collections.abc import Sequence

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.api.openai.requests import effort_arguments
from sluice.gateway.api.openai.responses.archive import Archive, PromptItems
from sluice.gateway.api.openai.responses.items import CALL_OUTPUTS, CALLS, ItemIds, JsonObject, store_item, to_messages
from sluice.gateway.api.openai.responses.schemas import (
    ConversationReference,
    CreateResponseRequest,
    InputItem,
    ItemReference,
    MessageItem,
    PromptFields,
)
from sluice.gateway.api.openai.responses.tools import prompt_tools
from sluice.pipelines.text.model import TextModel, refuse_images
from sluice.pipelines.text.types import ChatMessage, Conversation, EncodedPrompt, Prompt, TemplateOptions

_ITEMS_PER_TURN = 256
"""Items that are stored in one turn of the event loop: one takes some microseconds, and there may be thousands."""


async def gather_items(archive: Archive | None, owner: str, fields: PromptFields, ids: ItemIds) -> PromptItems:
    """Read what the new items follow, and give them ids. Raises INVALID, and NOT_FOUND for what is not stored."""
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


def conversation_id_of(fields: PromptFields) -> str | None:
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
    arguments = effort_arguments(effort_of(fields))
    if fields.text is not None and fields.text.verbosity is not None:
        arguments["verbosity"] = fields.text.verbosity
    options = TemplateOptions(tools=prompt_tools(fields), arguments=arguments)
    num_new = len(fields.input) if isinstance(fields.input, list) else 1
    return Conversation((*instructions, *to_messages(items, len(items) - num_new)), options)


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


def effort_of(fields: PromptFields) -> str | None:
    return None if fields.reasoning is None else fields.reasoning.effort
