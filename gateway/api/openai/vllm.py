"""vLLM's routes beside OpenAI's: `/tokenize`, `/detokenize`, and LoRA adapters that come and go at run time."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response
from pydantic import Field

from sluice.errors import invalid
from sluice.gateway.api.fields import MAX_TOOLS, offered_tools
from sluice.gateway.api.openai.chat import parse_messages
from sluice.gateway.api.openai.requests import check_trust, parse_template_options
from sluice.gateway.api.openai.schemas import (
    MAX_MODEL_CHARS,
    TemplateFields,
    TokenIds,
)
from sluice.gateway.api.openai.tokens import language_model, only_model
from sluice.gateway.api.openai.turns import ChatTurn, FunctionTool
from sluice.gateway.front.http.bodies import json_response, read_fields
from sluice.gateway.front.http.openapi import describe_body
from sluice.gateway.front.http.parsing import MAX_MESSAGES, RequestObject
from sluice.gateway.front.http.request import run_while_connected
from sluice.gateway.front.long_work import LONG_ELEMENTS
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.adapters import MAX_PATH_CHARS, RuntimeAdapters
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.encoding.llm_encoder import LlmEncoder
from sluice.pipelines.stages.tokenizer_model import TextTokenizer, check_token_ids
from sluice.pipelines.text.model import UNCOUNTED_IMAGES, refuse_images
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import Conversation, PromptForm

T = TypeVar("T")

MAX_ENCODER_CHARS = 1 << 18
"""Longest text for an encoder's tokenizer: no context bounds it, and each token takes hundreds of bytes."""
_PROMPT, _MESSAGES = "prompt", "messages"


class TokenizeRequest(TemplateFields):
    """`POST /tokenize`. The fields of conversations are for `messages` alone."""

    example = '{"model": "rill", "prompt": "What is a block table?"}'
    model: str | None = Field(
        None, max_length=MAX_MODEL_CHARS, description="A language model or encoder; absent: the only language model."
    )
    prompt: str | None = Field(None, description="A text. Either this or messages.")
    messages: list[ChatTurn] | None = Field(None, min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    add_special_tokens: bool | None = Field(
        None, description="Whether the tokenizer's special tokens are added: by default to a prompt, not to messages."
    )
    tools: list[FunctionTool] | None = Field(
        None, max_length=MAX_TOOLS, fail_fast=True, description="Functions that the messages may call."
    )
    return_token_strs: bool | None = Field(None, description="Whether to return each token as the vocabulary has it.")


class DetokenizeRequest(RequestObject):
    """`POST /detokenize`."""

    example = '{"model": "rill", "tokens": [100, 200, 300]}'
    model: str | None = Field(None, max_length=MAX_MODEL_CHARS, description="As of /tokenize.")
    tokens: TokenIds


class UnloadAdapterRequest(RequestObject):
    """`POST /v1/unload_lora_adapter`."""

    example = '{"lora_name": "rill:sql"}'
    lora_name: str = Field(
        min_length=1,
        max_length=MAX_MODEL_CHARS,
        description="MODEL:NAME; or NAME alone, where the server has one language model.",
    )


class LoadAdapterRequest(UnloadAdapterRequest):
    """`POST /v1/load_lora_adapter`."""

    example = '{"lora_name": "rill:sql", "lora_path": "/adapters/sql"}'
    lora_path: str = Field(
        min_length=1, max_length=MAX_PATH_CHARS, description="A folder on the server that PEFT wrote."
    )
    load_inplace: bool = Field(
        False, description="Whether an adapter of that name is replaced; without it the name must be free."
    )


def router(plane: Plane, adapters: RuntimeAdapters, config: ServeConfig) -> APIRouter:
    """Return the routes, which answer from `plane` and change `adapters`."""
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)

    @api.post("/tokenize", openapi_extra=describe_body(TokenizeRequest, ()))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or of a conversation."""
        fields, headers = await read_fields(request, TokenizeRequest, config.http)
        check_trust(fields, trusts_templates=config.requests.trusts_templates)
        tokenizer, max_model_len = _find(plane, fields.model)
        token_ids = await run_while_connected(request.receive, _encode(tokenizer, fields, max_model_len))
        strings = None
        if fields.return_token_strs:
            strings = await _run(len(token_ids), lambda: [tokenizer.spell(each) for each in token_ids])
        counts = {"count": len(token_ids), "max_model_len": max_model_len}
        return json_response({**counts, "tokens": token_ids, "token_strs": strings}, headers=headers)

    @api.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest, ()))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids, special tokens included."""
        fields, headers = await read_fields(request, DetokenizeRequest, config.http)
        tokenizer, _ = _find(plane, fields.model)

        def decode() -> str:
            check_token_ids(fields.tokens, tokenizer.num_tokens, "tokens")
            return tokenizer.decode(fields.tokens, skip_special_tokens=False)

        text = await run_while_connected(request.receive, _run(len(fields.tokens), decode))
        return json_response({"prompt": text}, headers=headers)

    @api.post("/v1/load_lora_adapter", openapi_extra=describe_body(LoadAdapterRequest, ()))
    async def load(request: Request) -> Response:
        """Load an adapter, which is then a model of its own."""
        fields, headers = await read_fields(request, LoadAdapterRequest, config.http)
        name = await adapters.load(fields.lora_name, fields.lora_path, replaces=fields.load_inplace)
        return _done(f"Success: LoRA adapter '{name}' added successfully.", headers)

    @api.post("/v1/unload_lora_adapter", openapi_extra=describe_body(UnloadAdapterRequest, ()))
    async def unload(request: Request) -> Response:
        """Remove an adapter. Requests in flight with it end as usual."""
        fields, headers = await read_fields(request, UnloadAdapterRequest, config.http)
        name = await adapters.unload(fields.lora_name)
        return _done(f"Success: LoRA adapter '{name}' removed successfully.", headers)

    return api


def _find(plane: Plane, name: str | None) -> tuple[Tokenizer | TextTokenizer, int | None]:
    """Return the tokenizer of a model and the model's context, None for none. Raises NOT_FOUND and INVALID."""
    name = only_model(plane) if name is None else name
    if plane.encoding.has_embeddings(name):
        encoder = plane.encoding.encoder(name)
        if isinstance(encoder, LlmEncoder):
            return encoder.text.tokenizer, encoder.max_model_len
        found = encoder.tokenizer()
        if found is None:
            raise invalid("model", f"the server does not have the tokenizer of model {name!r}")
        return found.tokenizer, encoder.max_model_len
    text = language_model(plane.llm(name))
    return text.tokenizer, text.max_model_len


def _done(message: str, headers: dict[str, str] | None) -> Response:
    return Response(message, media_type="text/plain", headers=headers)


async def _run(num_tokens: int, work: Callable[[], T]) -> T:
    return work() if num_tokens <= LONG_ELEMENTS else await asyncio.to_thread(work)


async def _encode(
    tokenizer: Tokenizer | TextTokenizer, fields: TokenizeRequest, max_model_len: int | None
) -> list[int]:
    if (fields.prompt is None) == (fields.messages is None):
        raise invalid(_PROMPT, "prompt or messages is required, and not both")
    if fields.messages is not None:
        if isinstance(tokenizer, TextTokenizer):
            raise invalid(_MESSAGES, "an encoder has no chat template; send prompt")
        messages, _ = parse_messages(fields.messages)
        sent = fields.tools or []
        offered = offered_tools([tool.function.name for tool in sent], "tools[{}].function.name").of(sent)
        tools = tuple(tool.model_dump(exclude_unset=True) for tool in offered)
        options = parse_template_options(fields, {}, tools=tools)
        form = PromptForm(add_special_tokens=fields.add_special_tokens)
        assert max_model_len is not None  # a language model's
        conversation = Conversation(messages, options)
        refuse_images(conversation, UNCOUNTED_IMAGES)
        return await tokenizer.encode_prompt(conversation, form, max_model_len)
    assert fields.prompt is not None
    adds_special = fields.add_special_tokens is not False
    if isinstance(tokenizer, Tokenizer):
        return await tokenizer.encode_text(fields.prompt, max_model_len, add_special_tokens=adds_special)
    if len(fields.prompt) > MAX_ENCODER_CHARS:
        size = f"{MAX_ENCODER_CHARS} characters, got {len(fields.prompt)}"
        raise invalid(_PROMPT, f"prompt must have at most {size}")
    return await asyncio.to_thread(tokenizer.encode_whole, fields.prompt, add_special_tokens=adds_special)
