"""vLLM's `/render` routes: the request of a chat, of texts, of a message or of a response in tokens, as
`/inference/v1/generate` takes it."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from fastapi import Request, Response
from pydantic import BaseModel

from sluice.engine.sampling_fields import SAMPLING_FIELDS, FieldOrigin
from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import SluiceError, invalid
from sluice.gateway.api.openai.tokens import TOKENS, language_model
from sluice.gateway.api.translators import Reply, Translate, Translator, adapt_requests, parse_with_schemas, warn_of
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.parsing import RequestObject
from sluice.pipelines.chat.lark import LarkWriter
from sluice.pipelines.llm.chat_answers import AnswerSettings, called_functions
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.text.model import TextModel, refuse_images
from sluice.pipelines.text.sampling import default_max_tokens
from sluice.pipelines.text.stream import salted_form, sent_prompt
from sluice.pipelines.text.types import ChatReader, Conversation, TextRequest, ToolChoice

JsonObject = dict[str, Any]
_GRAMMARS = {
    GrammarKind.JSON_SCHEMA: "json",
    GrammarKind.REGEX: "regex",
    GrammarKind.CHOICE: "choice",
    GrammarKind.EBNF: "grammar",
}
"""Fields of vLLM's structured outputs."""
_UNSENT = ("token_offsets", "features", "content_parts", "kv_transfer_params", "ec_transfer_params", "return_token_ids")
"""Fields of a prompt in tokens that are null where it is text alone."""


def rendering(translate: Translate[Any]) -> Callable[[Any, Request], Translator[Any]]:
    """Return what makes translators that render the requests of `translate`."""

    def translate_rendering(fields: Any, request: Request) -> RenderTranslator:
        return RenderTranslator(translate(fields, request), fields, request)

    return translate_rendering


class AtOnceTranslator(Translator[RequestObject]):
    """A request that is answered before anything is generated."""

    def parse(self, base: TextRequest) -> list[TextRequest]:
        raise NotImplementedError("the request is answered at once")

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        raise NotImplementedError("the request is answered at once")

    @property
    def is_streamed(self) -> bool:
        return False

    @staticmethod
    def encode_error(error: SluiceError) -> bytes:
        raise NotImplementedError("the request is answered at once")


class RenderTranslator(AtOnceTranslator):
    """A request of another route, which is rendered in place of being answered."""

    protocol = "vllm_render"

    def __init__(self, inner: Translator[Any], fields: RequestObject, request: Request) -> None:
        super().__init__(fields, request)
        self._inner = inner

    @property
    def model_name(self) -> str:
        return self._inner.model_name

    @property
    def model_key(self) -> str:
        return self._inner.model_key

    async def prepare(self, model: TextModel) -> Response | None:
        inner, text = self._inner, language_model(model)
        with client_names(inner.param_names):
            if (ready := await inner.prepare(model)) is not None:
                return ready
        requests = await parse_requests(inner, self.protocol, model)
        per_prompt = len(requests) // inner.num_prompts
        if per_prompt != (getattr(self.fields, "n", None) or 1):
            raise invalid("best_of", f"best_of must be n where prompts are rendered, got {per_prompt}")
        with client_names(inner.param_names):
            requests = adapt_requests(requests, model)
            readers = [reader for each in requests[:1] if (reader := model.chat_reader(each)) is not None]
            without_effect = inner.without_effect(model, requests[0])
            inner.check(model, readers)
            rendered = [await self._render(text, each, per_prompt) for each in requests[::per_prompt]]
        if len(rendered) > 1:
            for index, each in enumerate(rendered):
                each["request_id"] += f"-{index}"
        body = [{**each, "model": model.name} for each in rendered]
        is_chat = isinstance(sent_prompt(requests[0].prompt), Conversation)
        return json_response(body[0] if is_chat else body, headers=warn_of(requests[0], readers, without_effect))

    async def _render(self, text: LlmText, request: TextRequest, n: int) -> JsonObject:
        """Return one prompt in tokens, with how each of its `n` answers is generated."""
        prompt, inner = sent_prompt(request.prompt), self._inner
        await asyncio.sleep(0)  # there may be hundreds
        if isinstance(prompt, Conversation):
            refuse_images(prompt, ": a rendered prompt has tokens alone; send it where it is answered")
        with default_max_tokens(request):
            encoded = await text.prepare_shared(request.prompt, salted_form(request))
            settings = await text.settings(request, encoded.token_ids)
        if settings.sampling.beam_width > 1:
            raise invalid("use_beam_search", "use_beam_search must be false where a prompt is rendered")
        options = getattr(self.fields, "stream_options", None) if inner.is_streamed else None
        return {
            **dict.fromkeys(_UNSENT),
            "request_id": self.request_id,
            "token_ids": encoded.token_ids,
            "sampling_params": _sampling_params(request, settings, n),
            **_reasoning_fields(text, request, settings),
            "output_mode": TOKENS,
            "stream": inner.is_streamed,
            "stream_options": options.model_dump(exclude_none=True) if isinstance(options, BaseModel) else None,
            "cache_salt": request.cache_salt or None,
            "priority": inner.priority or 0,
        }


async def parse_requests(inner: Translator[Any], protocol: str, model: TextModel) -> list[TextRequest]:
    """Return the requests of a translator that another one stands before, as `model` takes them. Raises what it
    raises."""
    base = TextRequest(request_id=inner.request_id, prompt="", protocol=protocol)
    requests = await parse_with_schemas(inner.fields, partial(inner.parse, base), lambda parsed: parsed[0])
    with client_names(inner.param_names):
        return adapt_requests(requests, model)


def _reasoning_fields(text: LlmText, request: TextRequest, settings: AnswerSettings) -> JsonObject:
    """Return whether the reasoning is over where the prompt ends, None where the answer decides, and how the prompt was
    rendered."""
    format, prompt = text.formats.reasoning, sent_prompt(request.prompt)
    if format is None or not isinstance(prompt, Conversation):
        return {"reasoning_ended": None, "reasoning_parser_kwargs": None}
    lark = LarkWriter(text.tokenizer.added_token_ids)
    is_over = None if format.preamble(settings.prompt_end, lark) else True
    ended = False if format.is_open(settings.prompt_end) else is_over
    return {
        "reasoning_ended": ended,
        "reasoning_parser_kwargs": {"chat_template_kwargs": dict(prompt.options.arguments)},
    }


def _sampling_params(request: TextRequest, settings: AnswerSettings, n: int) -> JsonObject:
    """Return vLLM's SamplingParams of a request. A field that vLLM lacks is left out where it changes nothing."""
    sampling, form = settings.sampling, settings.form
    fields: JsonObject = {}
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        if value != field.default or field.origin in (FieldOrigin.OPENAI, FieldOrigin.VLLM):
            fields[name] = list(value) if isinstance(value, tuple) else value
    fields["logit_bias"] = {str(token_id): bias for token_id, bias in sampling.logit_bias.items()} or None
    fields["allowed_token_ids"] = list(sampling.allowed_token_ids) or None
    return fields | {
        "n": n,
        "stop": list(request.stop),
        "bad_words": list(request.bad_words),
        "skip_special_tokens": form.skip_special_tokens,
        "spaces_between_special_tokens": form.spaces_between_special_tokens,
        "include_stop_str_in_output": form.include_stop_str_in_output,
        "structured_outputs": _structured_outputs(request),
        "thinking_token_budget": settings.num_thinking,
        "extra_args": _extra_args(request),
    }


def _structured_outputs(request: TextRequest) -> JsonObject | None:
    """Return the client's constraint in vLLM's words; None for none."""
    if request.structural_tag:
        return {"structural_tag": request.structural_tag}
    grammar: Grammar | None = request.sampling.get("grammar")
    if grammar is None:
        return None
    if grammar.kind is GrammarKind.JSON_OBJECT:
        found: JsonObject = {"json_object": True}
    elif grammar.kind is GrammarKind.CHOICE:
        found = {"choice": msgspec.json.decode(grammar.text)}
    else:
        found = {_GRAMMARS[grammar.kind]: grammar.text}
    if grammar.whitespace is not None:
        found |= {"whitespace_pattern": grammar.whitespace} if grammar.whitespace else {"disable_any_whitespace": True}
    return found


def _extra_args(request: TextRequest) -> JsonObject | None:
    """Return what holds the answer to the tools of a conversation; None where nothing does."""
    prompt = sent_prompt(request.prompt)
    if not isinstance(prompt, Conversation):
        return None
    if prompt.options.tools:
        choice = request.tool_choice
        return {
            "tools": list(prompt.options.tools),
            "tool_choice": _tool_choice(choice),
            "parallel_tool_calls": choice.is_parallel,
        }
    called = called_functions(prompt)
    return {"called_functions": list(dict.fromkeys(called))} if called else None


def _tool_choice(choice: ToolChoice) -> str | JsonObject:
    mode = "required" if choice.is_required else "auto"
    if not choice.names:
        return mode
    tools = [{"type": "function", "function": {"name": name}} for name in choice.names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}
