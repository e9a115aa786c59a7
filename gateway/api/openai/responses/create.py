"""Creates responses: from the fields of `POST /v1/responses` to a text request, and to the object of the answer."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import orjson
from fastapi import Request, Response
from pydantic import BaseModel

from sluice.errors import SluiceError, invalid
from sluice.gateway.api.openai.requests import OpenAITranslator, can_reason, effort_arguments
from sluice.gateway.api.openai.responses.archive import Archive, PromptItems, ResponseRecord, error_object
from sluice.gateway.api.openai.responses.background import BackgroundRuns
from sluice.gateway.api.openai.responses.compaction import (
    CompactedReply,
    Summarizer,
    compact_threshold,
    compaction_item,
    has_more_than_messages,
    is_longer,
    is_trigger,
    summary_fields,
    summary_prompt,
)
from sluice.gateway.api.openai.responses.items import ItemIds, JsonObject, make_mark, repeatable
from sluice.gateway.api.openai.responses.prompt import (
    EarlierTurns,
    ResponsePrompt,
    conversation_id_of,
    effort_of,
    gather_items,
    make_prompt,
    need_archive,
    prompt_form,
)
from sluice.gateway.api.openai.responses.reply import ResponseReply
from sluice.gateway.api.openai.responses.schemas import CreateResponseRequest, ResponseTool, TextFormat
from sluice.gateway.api.openai.responses.tools import parse_tool_choice, tools_without_effect
from sluice.gateway.api.openai.schemas import JsonSchema, ResponseFormat
from sluice.gateway.api.translators import Answer
from sluice.gateway.front.http.parsing import refuse_foreign
from sluice.gateway.front.http.request import owner_of
from sluice.gateway.front.http.sse import GenerateFrames, event_frame, push_all
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.types import ChatReader, TextRequest

PARAM_NAMES = {"query": "input", "messages": "input", "max_tokens": "max_output_tokens"}
"""The client's names of fields that models name otherwise in their errors."""
_LOGPROBS, _SEALED_REASONING = "message.output_text.logprobs", "reasoning.encrypted_content"


def error_frame(error: SluiceError) -> bytes:
    """Return the event of a stream that broke before its response could end."""
    return event_frame({"type": "error", **error_object(error)}, "error")


class ResponseTranslator(OpenAITranslator[CreateResponseRequest]):
    """A response to create, whole, streamed or in the background."""

    protocol = "openai_responses"
    names = PARAM_NAMES
    encode_error = staticmethod(error_frame)
    memory: Mapping[str, EarlierTurns] = MappingProxyType({})
    """Responses that its prompt may follow and the archive need not have."""
    response_type: type[ResponseReply] = ResponseReply

    def __init__(
        self,
        fields: CreateResponseRequest,
        request: Request,
        *,
        archive: Archive | None,
        runs: BackgroundRuns | None,
        summarizer: Callable[..., Summarizer],
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
        self._make_summarizer = summarizer
        self._owner = owner_of(request.headers)
        self._mark = make_mark()
        self._ids = ItemIds(self._mark)
        self._items = PromptItems([], [])
        self._prompt = ResponsePrompt("", {}, [])
        self._request = request
        self._echoed = self.fields
        self._compaction: JsonObject | None = None
        """The compaction of a prompt that was too long, which comes before the answer."""

    async def prepare(self, model: TextModel) -> Response | None:
        self._items = await gather_items(self._archive, self._owner, self.fields, self._ids, self.memory)
        items = self._items.all
        if self.is_compaction:
            self.fields = summary_fields(self.fields, model)
            self._prompt = await summary_prompt(self.fields, items, model)
            return None
        self._prompt = await self._make_prompt(items, model)
        threshold = compact_threshold(self.fields)
        if threshold is None or not has_more_than_messages(items):
            return None
        if await is_longer(self._prompt, model, threshold, prompt_form(self.fields)):
            await self._compact(items, model)
        return None

    async def _make_prompt(self, items: Sequence[JsonObject], model: TextModel) -> ResponsePrompt:
        return await make_prompt(self.fields, items, model, self.fields.max_output_tokens or 1)

    async def _compact(self, items: Sequence[JsonObject], model: TextModel) -> None:
        """Have the model summarize the items, and go on with the summary."""
        summarizer = self._make_summarizer(
            self._request, protocol=self.protocol, priority=self.priority, session=self.session
        )
        summary = await summarizer.summarize(self.fields, items, model)
        if summary:
            self._compaction = compaction_item(self._ids, summary)
            shorter = await self._make_prompt([*items, self._compaction], model)
            self._prompt = shorter._replace(left_out=self._prompt.left_out)

    @property
    def is_compaction(self) -> bool:
        """Whether the answer is a compaction of the items."""
        return is_trigger(self._items.new)

    @property
    def session(self) -> str:
        return self.fields.prompt_cache_key or self._items.session or self.fields.user or self._mark

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields, form = self.fields, self.fields.response_format
        wants_logprobs = fields.top_logprobs or _LOGPROBS in (fields.include or ())
        logprobs = (fields.top_logprobs or 0) if wants_logprobs else None
        base = msgspec.structs.replace(base, tool_choice=parse_tool_choice(fields, self._prompt.tools))
        requests = self.parse_generation(base, [self._prompt.prompt], fields.max_output_tokens, logprobs)
        if "grammar" in self.param_names:
            path = "text.format" if form is None or form.json_schema is None else "text.format.schema"
            self.param_names = {**self.param_names, **({} if form is None else {"grammar": path})}
        return requests

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        fields, known = self.fields, model.template_names
        is_verbosity = fields.text is not None and fields.text.verbosity is not None
        verbosity = ["text.verbosity"] if is_verbosity and "verbosity" not in known else []
        effort = effort_arguments(effort_of(fields))
        is_vain = effort and known.isdisjoint(effort) and not can_reason(model, request, known)
        efforts = ["reasoning.effort"] if is_vain else []
        tools = tools_without_effect(fields, self._prompt.tools)
        return [*verbosity, *efforts, *tools, *self._prompt.left_out]

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> ResponseReply:
        response = response_object(
            f"resp_{self._mark}", self._echoed, model.name, self.options.service_tier, self.began_at
        )
        response["store"] = response["store"] and self._archive is not None
        cache = self.fields.prompt_cache_options
        if cache is not None and cache.comparison_response_id is not None:
            response["prompt_cache_diagnostics"] = None
        return self.response_type(
            self.record(response, self._items),
            self.request_id,
            self._ids,
            self.options.top_logprobs,
            readers[0] if readers else None,
            self._prompt.tools,
            seals_reasoning=_SEALED_REASONING in (self.fields.include or ()),
            is_compaction=self.is_compaction,
            compaction=self._compaction,
        )

    def record(self, response: JsonObject, items: PromptItems) -> ResponseRecord:
        """Return what keeps the response."""
        return ResponseRecord(self._archive, self._owner, response, items)

    async def detach(self, answer: Answer) -> GenerateFrames | bytes | None:
        if not self.fields.background or self._runs is None:
            return None
        assert isinstance(answer.reply, ResponseReply)
        run = await self._runs.start(answer.reply, answer.stream_texts, is_streamed=self.is_streamed)
        return orjson.dumps(run.response) if run.kept is None else partial(push_all, run.kept.follow(0))


class CompactTranslator(ResponseTranslator):
    """A compaction of items, which is nothing but what stands for them from then on."""

    response_type = CompactedReply
    is_compaction = True
    is_streamed = False

    async def detach(self, answer: Answer) -> None:
        """Do nothing: a compaction is not stored, so that nobody could ask for it later."""


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
        "text": repeatable("text", {"format": {"type": "text"}, **text}),
        "tool_choice": _as_sent(fields.tool_choice) or "auto",
        "tools": repeatable("tools", [_tool_object(tool) for tool in fields.tools or ()]),
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
