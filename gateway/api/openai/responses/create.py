"""Creates responses: from the fields of `POST /v1/responses` to a text request, and to the object of the answer."""

from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.openai.requests import OpenAITranslator, effort_arguments
from sluice.gateway.api.openai.responses.archive import Archive, PromptItems, ResponseRecord, error_object
from sluice.gateway.api.openai.responses.background import BackgroundRuns
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject, make_mark
from sluice.gateway.api.openai.responses.prompt import (
    conversation_id_of,
    effort_of,
    fit_prompt,
    gather_items,
    need_archive,
)
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest, ResponseTool, TextFormat
from sluice.gateway.api.openai.responses.tools import declared_tools, parse_tool_choice, tools_without_effect
from sluice.gateway.api.openai.schemas import JsonSchema, ResponseFormat
from sluice.gateway.api.translators import Answer
from sluice.gateway.front.http.parsing import refuse_foreign
from sluice.gateway.front.http.request import owner_of
from sluice.gateway.front.http.sse import GenerateFrames, event_frame, push_all
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import ChatReader, Prompt, TextRequest

T = TypeVar("T")
PARAM_NAMES = {"query": "input", "messages": "input", "max_tokens": "max_output_tokens"}
"""The client's names of fields that models name otherwise in their errors."""
_LOGPROBS = "message.output_text.logprobs"


def error_frame(error: SluiceError) -> bytes:
    """Return the event of a stream that broke before its response could end."""
    return event_frame({"type": "error", **error_object(error)}, "error")


class ResponseTranslator(OpenAITranslator[CreateResponseRequest]):
    """A response to create, whole, streamed or in the background."""

    protocol = "openai_responses"
    names = PARAM_NAMES
    encode_error = staticmethod(error_frame)

    def __init__(
        self, fields: CreateResponseRequest, request: Request, *, archive: Archive | None, runs: BackgroundRuns | None
    ) -> None:
        refuse_foreign(fields)
        if fields.background and fields.store is False:
            message = "background must be false where store is false: nothing would keep the response"
            raise invalid("background", message)
        if fields.background:
            need_archive(archive, "background")
        form = None if fields.text is None or fields.text.format is None else _response_format(fields.text.format)
        super().__init__(fields.model_copy(update={"response_format": form, "stream_options": None}), request)
        self._archive = archive
        self._runs = runs
        self._owner = owner_of(request.headers)
        self._mark = make_mark()
        self._ids = ItemIds(self._mark)
        self._items = PromptItems([], [])
        self._prompt: Prompt = ""

    async def prepare(self, model: TextModel) -> Response | None:
        self._items = await gather_items(self._archive, self._owner, self.fields, self._ids)
        self._prompt = await fit_prompt(self.fields, self._items.all, model)
        return None

    @property
    def session(self) -> str:
        return self.fields.prompt_cache_key or self._items.session or self._mark

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields, form = self.fields, self.fields.response_format
        wants_logprobs = fields.top_logprobs or _LOGPROBS in (fields.include or ())
        logprobs = (fields.top_logprobs or 0) if wants_logprobs else None
        base = msgspec.structs.replace(base, tool_choice=parse_tool_choice(fields))
        requests = self.parse_generation(base, [self._prompt], fields.max_output_tokens, logprobs)
        if "grammar" in self.param_names:
            path = "text.format" if form is None or form.json_schema is None else "text.format.schema"
            self.param_names = {**self.param_names, **({} if form is None else {"grammar": path})}
        return requests

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        fields, known = self.fields, model.template_names
        is_verbosity = fields.text is not None and fields.text.verbosity is not None
        verbosity = ["text.verbosity"] if is_verbosity and "verbosity" not in known else []
        effort = effort_arguments(effort_of(fields))
        efforts = ["reasoning.effort"] if effort and known.isdisjoint(effort) else []
        return [*verbosity, *efforts, *tools_without_effect(fields)]

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> ResponseReply:
        response = response_object(
            f"resp_{self._mark}", self.fields, model.name, self.options.service_tier, self.began_at
        )
        response["store"] = response["store"] and self._archive is not None
        return ResponseReply(
            ResponseRecord(self._archive, self._owner, response, self._items),
            self.request_id,
            self._ids,
            self.options.top_logprobs,
            readers[0] if readers else None,
            declared_tools(self.fields),
        )

    async def detach(self, answer: Answer) -> GenerateFrames | bytes | None:
        if not self.fields.background or self._runs is None:
            return None
        assert isinstance(answer.reply, ResponseReply)
        run = await self._runs.start(answer.reply, answer.stream_texts, is_streamed=self.is_streamed)
        return orjson.dumps(run.response) if run.kept is None else partial(push_all, run.kept.follow(0))


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
        "conversation": None if fields.conversation is None else {"id": conversation_id_of(fields)},
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": {"effort": effort_of(fields), "summary": None},
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
