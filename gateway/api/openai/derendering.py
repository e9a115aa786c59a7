"""vLLM's `/derender` routes: the answer of a chat, or of texts, made of the tokens that `/inference/v1/generate` gave.

A whole answer is made as that of the route itself. A stream's chunk comes with a state, which the client sends back
with the next one: nothing is kept here.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, cast

import msgspec
import orjson
from fastapi import APIRouter, Request, Response

from sluice.engine.client.stream import Consumer
from sluice.engine.types import EventDetail, FinishReason, TokenEvent, TokenLogprob
from sluice.errors import invalid
from sluice.gateway.api.openai.chat import ChatTranslator
from sluice.gateway.api.openai.completions import CompletionTranslator
from sluice.gateway.api.openai.generated import (
    DerenderChatRequest,
    DerenderCompletionRequest,
    DerenderFields,
    GeneratedChoice,
    GeneratedLogprobs,
    GeneratedToken,
    GeneratedTokens,
    StreamState,
    TokenAnswer,
)
from sluice.gateway.api.openai.rendering import AtOnceTranslator, parse_requests, rendering
from sluice.gateway.api.openai.reply import OpenAIReply
from sluice.gateway.api.openai.requests import OpenAITranslator
from sluice.gateway.api.openai.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
)
from sluice.gateway.api.openai.tokens import GenerateTokensRequest, TokensTranslator, language_model, only_model
from sluice.gateway.api.translators import Answer, Answering
from sluice.gateway.front.http.bodies import json_response
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.long_work import LONG_ELEMENTS, run_aside
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.stages.tokenizer_model import check_token_ids
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.stream import salted_form, sent_prompt
from sluice.pipelines.text.types import ChatReader, EncodedPrompt, TextEvent, TextRequest

JsonObject = dict[str, Any]
T = TypeVar("T")
_PIECE_TOKENS = 256
"""Tokens that are read in one turn of the event loop, in about 3 ms."""
_ID_BITS = 31


def router(plane: Plane, config: ServeConfig, answering: Answering) -> APIRouter:
    """Return the routes of prompts and answers in tokens."""
    api = APIRouter(tags=["OpenAI"], default_response_class=Response)
    trusts = config.requests.trusts_templates
    chat = partial(ChatTranslator, trusts_templates=trusts)
    about = "Return the prompt of a request in tokens, as `/inference/v1/generate` takes it."
    for path, schema, translate in (
        ("/v1/chat/completions", ChatCompletionRequest, rendering(chat)),
        ("/v1/completions", CompletionRequest, rendering(CompletionTranslator)),
    ):
        answering.serve(api, f"{path}/render", f"render_{path.rsplit('/', 1)[1]}", about, schema, translate)
    about = "Continue token ids with token ids."
    generate = partial(TokensTranslator, plane=plane)
    answering.serve(api, "/inference/v1/generate", "generate_tokens", about, GenerateTokensRequest, generate)
    about = "Return the answer that a request would have had, from its tokens."
    derender = partial(derender_chat, plane=plane, trusts_templates=trusts)
    answering.serve(api, "/v1/chat/completions/derender", "derender_chat", about, DerenderChatRequest, derender)
    texts = partial(derender_completion, plane=plane)
    answering.serve(api, "/v1/completions/derender", "derender_texts", about, DerenderCompletionRequest, texts)
    return api


def derender_chat(
    fields: DerenderChatRequest, request: Request, *, plane: Plane, trusts_templates: bool
) -> "DerenderTranslator":
    """Return the translator of a chat's answer."""
    sent = fields.chat_request
    name = fields.model or (only_model(plane) if sent is None else sent.model)
    if sent is None:
        sent = ChatCompletionRequest.model_validate({"model": name, "messages": [{"role": "user", "content": ""}]})
    answers = []
    if fields.generate_response is not None:
        answers.append(
            TokenAnswer("generate_response", fields.generate_response, fields.prompt_token_ids, fields.prompt_tokens)
        )
    chunk = None
    if fields.generate_chunk is not None:
        chunk = TokenAnswer("generate_chunk", fields.generate_chunk, fields.prompt_token_ids, fields.prompt_tokens)
    inner = ChatTranslator(sent.model_copy(update={"model": name}), request, trusts_templates=trusts_templates)
    needs = "" if fields.chat_request is not None else "chat_request"
    return DerenderTranslator(fields, request, inner, answers, chunk, field="generate_response", needs=needs)


def derender_completion(fields: DerenderCompletionRequest, request: Request, *, plane: Plane) -> "DerenderTranslator":
    """Return the translator of the answers to texts."""
    sent, responses = fields.completion_request, fields.generate_responses or []
    ids, counts, chunk = fields.prompt_token_ids, fields.prompt_tokens, None
    if fields.stream and fields.generate_chunk is not None:
        one = cast(list[int], ids) if ids and not isinstance(ids[0], list) else None
        count = counts if isinstance(counts, int) else None
        chunk = TokenAnswer("generate_chunk", fields.generate_chunk, one, count)
    prompts = _for_each("prompt_token_ids", ids, responses)
    numbers = _for_each("prompt_tokens", counts, responses)
    answers = [
        TokenAnswer(f"generate_responses[{i}]", each, prompts[i], numbers[i]) for i, each in enumerate(responses)
    ]
    name = fields.model or (only_model(plane) if sent is None else sent.model)
    if sent is None:
        known = [each.prompt or [0] for each in answers or ([chunk] if chunk is not None else [])]
        sent = CompletionRequest(model=name, prompt=known or [[0]])
    inner = CompletionTranslator(sent.model_copy(update={"model": name}), request)
    return DerenderTranslator(fields, request, inner, answers, chunk, field="generate_responses")


def _for_each(name: str, values: Any, responses: Sequence[GeneratedTokens]) -> list[Any]:
    """Return what a field has for each response; None where it is absent."""
    if values is None or not responses:
        return [None] * len(responses)
    is_list = isinstance(values, list) and not (name == "prompt_token_ids" and values and isinstance(values[0], int))
    if not is_list or len(values) != len(responses):
        got = str(len(values)) if is_list else "those of one"
        raise invalid(name, f"{name} must have one for each of the {len(responses)} generate_responses, got {got}")
    return list(values)


class DerenderTranslator(AtOnceTranslator):
    """Tokens that are read in the words of another route."""

    protocol = "vllm_derender"

    def __init__(
        self,
        fields: DerenderFields,
        request: Request,
        inner: OpenAITranslator[Any],
        answers: Sequence[TokenAnswer],
        chunk: TokenAnswer | None,
        *,
        field: str,
        needs: str = "",
    ) -> None:
        """`inner` translates the rendered request. `field` is that of whole answers, and `needs` the one that a model
        which reasons needs and that is absent."""
        super().__init__(fields, request)
        self._inner = inner
        self._answers = answers
        self._chunk = chunk
        self._field = field
        self._needs = needs
        self._state = fields.stream_state or StreamState.model_validate({})
        self._is_chunk = bool(fields.stream)

    @property
    def model_name(self) -> str:
        return self._inner.model_name

    async def prepare(self, model: TextModel) -> Response | None:
        text = language_model(model)
        if self._needs and text.formats.reasoning is not None:
            reason = f"with model '{model.name}', which reasons; send the request that was rendered"
            raise invalid(self._needs, f"{self._needs} is required {reason}")
        missing = "generate_chunk" if self._is_chunk else self._field
        if self._chunk is None if self._is_chunk else not self._answers:
            raise invalid(missing, f"{missing} is required where stream is {str(self._is_chunk).lower()}")
        requests = await parse_requests(self._inner, self.protocol, model)
        with client_names(self._inner.param_names):
            if self._is_chunk:
                return json_response(await self._derender_chunk(model, text, requests[0]))
            return json_response(await self._derender_whole(model, text, requests))

    async def _derender_whole(self, model: TextModel, text: LlmText, requests: Sequence[TextRequest]) -> JsonObject:
        inner, answers = self._inner, self._answers
        if inner.num_prompts != len(answers):
            message = f"{self._field} must have one for each of the {inner.num_prompts} prompts, got {len(answers)}"
            raise invalid(self._field, message)
        n = len(answers[0].tokens.choices)
        wrong = next((each for each in answers if len(each.tokens.choices) != n or n == 0), None)
        if wrong is not None:
            num, name = len(wrong.tokens.choices), f"{wrong.path}.choices"
            raise invalid(name, f"{name} must have as many answers as all others, and one at least, got {num}")
        inner.options = replace(inner.options, n=n, best_of=n)
        per_prompt, texts, readers = len(requests) // len(answers), [], list[ChatReader]()
        for index, answer in enumerate(answers):
            request = await self._with_prompt(text, requests[index * per_prompt], answer)
            for place, choice in enumerate(answer.tokens.choices):
                await _check_ids(text, choice, f"{answer.path}.choices[{place}]")
                readers += [reader] if (reader := model.chat_reader(request)) is not None else []
                _check_length(text, request, f"{answer.path}.choices[{place}].token_ids", choice)
                texts.append(partial(_replay, text, request, answer, choice, partial(_pieces, choice)))
        reply = inner.reply(model, readers)
        found: JsonObject = orjson.loads(await Answer(texts, reply, len(answers), inner.param_names).whole())
        first = answers[0].tokens
        kept = {"id": first.request_id, "kv_transfer_params": first.kv_transfer_params}
        return {**found, **{name: value for name, value in kept.items() if value is not None}}

    async def _derender_chunk(self, model: TextModel, text: LlmText, request: TextRequest) -> JsonObject:
        inner, answer, state = self._inner, self._chunk, self._state
        assert answer is not None
        if len(answer.tokens.choices) > 1:
            name, num = "generate_chunk.choices", len(answer.tokens.choices)
            raise invalid(name, f"{name} must have one choice at most, got {num}: each has a stream_state of its own")
        inner.options = replace(inner.options, n=1, best_of=1, num_prompts=1)
        request = await self._with_prompt(text, request, answer)
        reader = model.chat_reader(request)
        reply = inner.reply(model, [] if reader is None else [reader])
        assert isinstance(reply, OpenAIReply)
        head = reply.chunk({}) | ({} if answer.tokens.request_id is None else {"id": answer.tokens.request_id})
        if not answer.tokens.choices:
            state_after = {**self._state.model_dump(exclude_none=True)}
            return {"chunk": {**head, "choices": [], "usage": answer.tokens.usage}, "stream_state": state_after}
        [choice] = answer.tokens.choices
        await _check_ids(text, choice, "generate_chunk.choices[0]")
        logged = None if state.output_logprobs is None else GeneratedLogprobs(content=state.output_logprobs)
        before = GeneratedChoice(index=0, token_ids=state.output_token_ids, logprobs=logged)
        await _check_ids(text, before, "stream_state")
        _check_length(text, request, "stream_state.output_token_ids", before, choice)
        earlier, frames, num_taken = await self._earlier_events(request, before), list[bytes](), 0

        async def events() -> list[TokenEvent]:
            return [*earlier, *await _pieces(choice, is_over=choice.finish_reason is not None)]

        def take(event: TextEvent) -> None:
            nonlocal num_taken
            num_taken += 1
            frame = reply.frame(0, event)
            if num_taken > len(earlier):
                frames.append(frame)

        await _replay(text, request, answer, choice, events, _Taker(take))
        piece = _merged([each for frame in frames for each in _choices_of(frame)])
        has_delta = "delta" in reply.piece(0, "", None)
        bare: JsonObject = {"delta": {}} if has_delta else {"text": ""}
        piece = {**bare, "logprobs": None, "finish_reason": None, **piece, "index": choice.index or 0}
        return {"chunk": {**head, "choices": [piece]}, "stream_state": self._state_after(choice, piece)}

    async def _earlier_events(self, request: TextRequest, before: GeneratedChoice) -> list[TokenEvent]:
        """Return the tokens of earlier chunks as events. Log probabilities and ids of tokens come with what a chunk
        shows, so that they need the chunks as they were."""
        if request.sampling.get("logprobs") is None and not request.form.return_token_ids:
            return await _pieces(before, is_over=False)
        lengths, num = self._state.output_chunk_lens or [], len(before.token_ids or ())
        if sum(lengths) != num or any(each < 1 for each in lengths):
            path = "stream_state.output_chunk_lens"
            raise invalid(path, f"{path} must be positive, {num} in sum: the tokens of each chunk, got {sum(lengths)}")
        spans = zip(lengths, accumulate(lengths), strict=True)
        return [event for length, end in spans for event in await _pieces(before, end - length, end, is_over=False)]

    def _state_after(self, choice: GeneratedChoice, piece: JsonObject) -> JsonObject:
        """Return the state for the next chunk. Other fields that vLLM has are as those of a stream's first chunk."""
        state, new = self._state, choice.token_ids or []
        before = state.output_token_ids or []
        lengths = state.output_chunk_lens or ([len(before)] if before else [])
        sent = choice.logprobs.content if choice.logprobs is not None else None
        kept = [*(state.output_logprobs or ()), *(sent or ())]
        return {
            "role_sent": bool(state.role_sent) or "role" in piece.get("delta", {}),
            "output_token_ids": [*before, *new],
            "output_chunk_lens": [*lengths, *([len(new)] if new else [])],
            **({"output_logprobs": kept} if kept else {}),
        }

    async def _with_prompt(self, text: LlmText, request: TextRequest, answer: TokenAnswer) -> TextRequest:
        """Return a request with its prompt in tokens: those that were sent, or the rendered request's."""
        if (ids := answer.prompt) is not None:
            await _aside(len(ids), partial(check_token_ids, ids, text.tokenizer.num_tokens, "prompt_token_ids"))
            return msgspec.structs.replace(request, prompt=EncodedPrompt(sent_prompt(request.prompt), ids))
        prompt = await text.prepare_shared(request.prompt, salted_form(request))
        return msgspec.structs.replace(request, prompt=prompt)


class _Taker:
    """Calls a function with each event, and lets others run before the next one."""

    def __init__(self, function: Callable[[TextEvent], object]) -> None:
        self._function = function

    def take(self, event: TextEvent) -> bool:
        self._function(event)
        return False

    async def ready(self) -> None:
        await asyncio.sleep(0)


async def _replay(
    text: LlmText,
    request: TextRequest,
    answer: TokenAnswer,
    choice: GeneratedChoice,
    make_events: Callable[[], Awaitable[Sequence[TokenEvent]]],
    consumer: Consumer[TextEvent],
) -> None:
    """Push the text of token events, with the counts and the end that were sent with them."""
    events = await make_events()
    if not events:
        return
    (num_prompt, num_cached), first = answer.counts, events[0]
    logged = await _aside(len(answer.tokens.prompt_logprobs or ()), partial(_prompt_logprobs, request, answer))
    detail = msgspec.structs.replace(
        first.detail or EventDetail(),
        num_cached_tokens=num_cached,
        num_prompt_tokens=num_prompt,
        prompt_logprobs=logged,
    )

    def restore(event: TextEvent) -> None:
        if event.finish_reason is not None and not isinstance(event.stop_reason, str):
            reason = FinishReason(choice.finish_reason or FinishReason.STOP)
            event = msgspec.structs.replace(event, finish_reason=reason, stop_reason=choice.stop_reason)
        consumer.take(event)

    await text.replay(request, [msgspec.structs.replace(first, detail=detail), *events[1:]], _Taker(restore))


def _prompt_logprobs(request: TextRequest, answer: TokenAnswer) -> list[TokenLogprob | None] | None:
    """Return the log probabilities of a prompt as the engine gives them; None where nobody asks for them."""
    sent, prompt = answer.tokens.prompt_logprobs, request.prompt
    if sent is None or request.sampling.get("prompt_logprobs") is None:
        return None
    assert isinstance(prompt, EncodedPrompt)
    path = f"{answer.path}.prompt_logprobs"
    if len(sent) != len(prompt.token_ids):
        message = f"{path} must have one for each of the {len(prompt.token_ids)} tokens of the prompt, got {len(sent)}"
        raise invalid(path, message)
    try:
        return [_prompt_logprob(token_id, each) for token_id, each in zip(prompt.token_ids, sent, strict=True)]
    except (AttributeError, KeyError, TypeError, ValueError):
        reason = 'null, or {"TOKEN_ID": {"logprob": ..., "rank": ...}} with the prompt\'s own token'
        raise invalid(path, f"{path} must have for each token {reason}") from None


def _prompt_logprob(token_id: int, sent: dict[str, dict[str, Any]] | None) -> TokenLogprob | None:
    if sent is None:
        return None
    ranked = sorted((each["rank"], int(other), float(each["logprob"])) for other, each in sent.items() if each["rank"])
    if any(other.bit_length() > _ID_BITS for _, other, _ in ranked):
        raise ValueError(sent)
    return TokenLogprob(
        token_id, float(sent[str(token_id)]["logprob"]), [(other, logprob) for _, other, logprob in ranked]
    )


async def _pieces(
    choice: GeneratedChoice, start: int = 0, end: int | None = None, *, is_over: bool = True
) -> list[TokenEvent]:
    """Return a choice's tokens from `start` to `end` as events, the last of which ends it where it `is_over`. Others
    run meanwhile."""
    end, events = len(choice.token_ids or ()) if end is None else end, list[TokenEvent]()
    for begin in range(start, end, _PIECE_TOKENS):
        until = min(begin + _PIECE_TOKENS, end)
        events.append(_event(choice, begin, until, is_last=is_over and until == end))
        await asyncio.sleep(0)
    return events if events or not is_over else [_event(choice, start, start, is_last=True)]


def _event(choice: GeneratedChoice, start: int, end: int, *, is_last: bool) -> TokenEvent:
    """Return tokens of a choice as the engine's event. A stop string, which is found again, ends the text by itself."""
    token_ids = (choice.token_ids or [])[start:end]
    by_token = choice.finish_reason != "length" and not isinstance(choice.stop_reason, str) and bool(token_ids)
    reason = (FinishReason.STOP if by_token else FinishReason.LENGTH) if is_last else None
    content = choice.logprobs.content if choice.logprobs is not None else None
    detail = None if content is None else EventDetail(logprobs=[_logprob(each) for each in content[start:end]])
    return TokenEvent(0, token_ids, reason, detail)


def _logprob(sent: GeneratedToken) -> TokenLogprob:
    ranked = sorted((each.rank, each.token_id, each.logprob) for each in sent.top_logprobs or () if each.rank)
    return TokenLogprob(sent.token_id, sent.logprob, [(token_id, logprob) for _, token_id, logprob in ranked])


async def _check_ids(text: LlmText, choice: GeneratedChoice, path: str) -> None:
    """Raise INVALID for tokens that the model lacks."""
    num, content = text.tokenizer.num_tokens, (choice.logprobs.content if choice.logprobs is not None else None) or []

    def check() -> None:
        check_token_ids(choice.token_ids or (), num, f"{path}.token_ids")
        named = [each.token_id for token in content for each in (token, *(token.top_logprobs or ()))]
        check_token_ids(named, num, f"{path}.logprobs.content")

    await _aside(len(choice.token_ids or ()) + len(content), check)


async def _aside(num: int, work: Callable[[], T]) -> T:
    return work() if num <= LONG_ELEMENTS else await run_aside(work)


def _check_length(text: LlmText, request: TextRequest, path: str, *choices: GeneratedChoice) -> None:
    """Raise INVALID for more tokens than the context has."""
    assert isinstance(request.prompt, EncodedPrompt)
    num = len(request.prompt.token_ids) + sum(len(each.token_ids or ()) for each in choices)
    if num > text.max_model_len:
        message = f"{path} is too long: with the prompt it has {num} tokens; the context is {text.max_model_len}"
        raise invalid(path, message)


def _choices_of(frames: bytes) -> list[JsonObject]:
    """Return the choices in the events of a stream."""
    found = [orjson.loads(each.removeprefix(b"data: ")) for each in frames.split(b"\n\n") if each]
    return [choice for each in found for choice in each["choices"]]


def _merged(pieces: Sequence[JsonObject]) -> JsonObject:
    """Return pieces of one choice as one."""
    whole: JsonObject = {}
    for piece in pieces:
        for name, value in piece.items():
            whole[name] = _joined(whole.get(name), value)
    return whole


def _joined(before: Any, more: Any) -> Any:
    """Return a field's value in two pieces as one: texts and lists are joined, calls by their index."""
    if before is None or more is None:
        return before if more is None else more
    if isinstance(before, dict):
        return {name: _joined(before.get(name), more.get(name)) for name in {**before, **more}}
    if isinstance(before, list) and before and isinstance(before[0], dict) and "index" in before[0]:
        return _joined_calls(before, more)
    return before + more if isinstance(before, str | list) else more


def _joined_calls(before: list[JsonObject], more: list[JsonObject]) -> list[JsonObject]:
    calls = {each["index"]: each for each in before}
    for each in more:
        earlier = calls.get(each["index"])
        calls[each["index"]] = (
            each if earlier is None else {**earlier, "function": _joined(earlier["function"], each["function"])}
        )
    return list(calls.values())
