"""From the fields of `/api/chat` and `/api/generate` to a text request."""

import json
from typing import Any

import msgspec

from engine.types import Grammar, GrammarKind
from gateway.http.ollama.schemas import AnswerRequest, OllamaChatRequest, OllamaGenerateRequest, Options
from pipelines.text.model import TextModel
from pipelines.text.sampling import drop_random_seed
from pipelines.text.types import ChatMessage, Conversation, EncodedPrompt, TemplateOptions, TextRequest
from sluice.errors import SluiceError, invalid

_SAME_NAMES = ("temperature", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty")
_NO_OPTIONS = Options.model_validate({})


def parse_answer_request(fields: AnswerRequest, base: TextRequest) -> TextRequest:
    """Return the request without its prompt. `base` has what every route reads alike: id, protocol and scheduling."""
    if fields.think:
        raise invalid(
            "think", f"think must be false, got {json.dumps(fields.think)}: model {fields.model!r} does not think"
        )
    if fields.top_logprobs and not fields.logprobs:
        raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
    options = fields.options or _NO_OPTIONS
    sampling = _sampling(options)
    if fields.logprobs:
        sampling["logprobs"] = fields.top_logprobs or 0
    if fields.format not in (None, ""):
        sampling["grammar"] = _grammar(fields.format)
    stop = options.stop or ()
    return msgspec.structs.replace(
        base,
        sampling=sampling,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        max_tokens_name="options.num_predict",
    )


def _sampling(options: Options) -> dict[str, Any]:
    sampling = {name: getattr(options, name) for name in _SAME_NAMES} | {
        "repetition_penalty": options.repeat_penalty,
        "top_k": 0 if options.top_k == -1 else options.top_k,
        "max_tokens": options.num_predict if (options.num_predict or 0) > 0 else None,
    }
    return drop_random_seed({name: value for name, value in sampling.items() if value is not None})


def _grammar(sent: str | dict[str, Any]) -> Grammar:
    if isinstance(sent, str):
        return Grammar(GrammarKind.JSON_OBJECT)
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(sent, ensure_ascii=False))


def parse_chat(fields: OllamaChatRequest) -> Conversation:
    """Return the conversation to answer. Raises INVALID for an answer to continue."""
    messages = fields.messages or []
    if messages and messages[-1].role == "assistant":
        place = f"messages[{len(messages) - 1}].role"
        raise invalid(place, f"{place} must be 'user', got 'assistant': this server cannot continue a begun answer")
    return Conversation(tuple(ChatMessage(each.role, each.content) for each in messages))


class GenerateMemory:
    """The conversation of `/api/generate`: a client sends it as token ids, and gets it back with the new turns."""

    def __init__(self, model: TextModel, fields: OllamaGenerateRequest) -> None:
        self._model = model
        self._earlier = fields.context or []
        system = [ChatMessage("system", fields.system)] if fields.system else []
        self._turns = (*system, ChatMessage("user", fields.prompt or ""))

    async def prompt(self) -> Conversation | EncodedPrompt:
        """Return what the model answers. Raises INVALID for a context that it cannot take."""
        asked = Conversation(self._turns)
        if not self._earlier:
            return asked
        encoded = await self._encode(asked)
        if encoded is None:
            raise invalid("context", f"model {self._model.name!r} takes no context: it is a pipeline; use /api/chat")
        return EncodedPrompt(asked, encoded)

    async def context(self, answer: str) -> list[int] | None:
        """Return the token ids of the conversation up to the end of `answer`; None where the model gives none."""
        turns = (*self._turns, ChatMessage("assistant", answer))
        try:
            return await self._encode(Conversation(turns, TemplateOptions(adds_generation_prompt=False)))
        except SluiceError:  # a template that refuses its own answer takes nothing from the answer itself
            return None

    async def _encode(self, conversation: Conversation) -> list[int] | None:
        prompt = await self._model.prepare_shared(conversation)
        if not isinstance(prompt, EncodedPrompt):
            return None
        if not self._earlier:
            return prompt.token_ids
        start = await self._model.prepare_shared("")
        special = start.token_ids if isinstance(start, EncodedPrompt) else []
        is_repeated = bool(special) and prompt.token_ids[: len(special)] == special
        return self._earlier + prompt.token_ids[len(special) if is_repeated else 0 :]
