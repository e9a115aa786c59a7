"""From the fields of `/api/chat` and `/api/generate` to a text request."""

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import msgspec
from fastapi import Request, Response

from sluice.engine.types import Grammar, GrammarKind
from sluice.errors import SluiceError, invalid
from sluice.gateway.api.fields import json_text, offered_tools
from sluice.gateway.api.ollama.models import repository_name
from sluice.gateway.api.ollama.reply import LineStreamResponse, OllamaReply, PieceReader, error_line
from sluice.gateway.api.ollama.schemas import (
    AnswerRequest,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    Options,
)
from sluice.gateway.api.translators import Reply, Translator, stop_strings
from sluice.gateway.front.http.parsing import warning_header
from sluice.gateway.plane.data_plane import Plane
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.sampling import drop_random_seed
from sluice.pipelines.text.types import (
    EFFORT_ARGUMENT,
    THINKING_SWITCHES,
    ChatMessage,
    ChatReader,
    Conversation,
    EncodedPrompt,
    ImagePart,
    Prompt,
    PromptForm,
    TemplateOptions,
    TextRequest,
    ToolCall,
)

AnswerT = TypeVar("AnswerT", bound=AnswerRequest)
_SAME_NAMES = ("temperature", "top_p", "min_p", "typical_p", "seed", "presence_penalty", "frequency_penalty")
MAX_TEMPERATURE = 2.0
"""The highest temperature of the engine."""
_BOUNDED = (("temperature", MAX_TEMPERATURE), ("top_p", 1.0), ("min_p", 1.0))
_PENALTIES, _OFF = ("repetition_penalty", "presence_penalty", "frequency_penalty"), (1.0, 0.0, 0.0)
_NO_TIME = re.compile(r"[-+]?(0|((0+(\.0*)?|\.0+)(ns|us|µs|μs|ms|s|m|h))+)")
"""A duration of 0, as Go writes durations."""
_NO_OPTIONS = Options.model_validate({})


class OllamaTranslator(Translator[AnswerT]):
    """A request for text, and what becomes of its options."""

    stream_type = LineStreamResponse
    encode_error = staticmethod(error_line)
    is_chat: ClassVar[bool]

    def __init__(self, fields: AnswerT, request: Request, *, plane: Plane) -> None:
        super().__init__(fields, request)
        num_logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
        self._reply = OllamaReply(fields.model, num_logprobs, is_chat=self.is_chat)
        self._model_name = repository_name(plane, fields.model)
        self._prompt: Prompt = ""

    @property
    def model_name(self) -> str:
        return self._model_name

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields, options = self.fields, self.fields.options or _NO_OPTIONS
        if fields.top_logprobs and not fields.logprobs:
            raise invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        sampling = _sampling(options)
        num_predict = options.num_predict or 0
        if fields.logprobs:
            sampling["logprobs"] = fields.top_logprobs or 0
        if fields.format not in (None, ""):
            sampling["grammar"] = _grammar(fields.format)
        request = msgspec.structs.replace(
            base,
            prompt=self._prompt,
            sampling=sampling,
            stop=stop_strings(options.stop),
            default_max_tokens=num_predict if num_predict > 0 else None,
        )
        return [request]

    def without_effect(self, model: TextModel, request: TextRequest) -> list[str]:
        """Return the paths of the options whose value is not the one that counts."""
        options, names = self.fields.options or _NO_OPTIONS, []
        if (options.temperature or 0.0) > MAX_TEMPERATURE:
            names.append("options.temperature")
        penalties = options.repeat_penalty, options.presence_penalty, options.frequency_penalty
        if (options.repeat_last_n or -1) > 0 and any(
            each not in (None, off) for each, off in zip(penalties, _OFF, strict=True)
        ):
            names.append("options.repeat_last_n")
        return names

    def reply(self, model: TextModel, readers: Sequence[ChatReader]) -> Reply:
        if readers:
            self._reply.pieces = PieceReader(readers[0], shows_thinking=self.fields.think is not False)
        return self._reply

    @property
    def is_streamed(self) -> bool:
        return self.fields.stream is not False

    def _loaded(self) -> Response:
        """Answer a request that asks for no text. One that would unload the model is answered as if it had: the next
        request would load it again, and the model stays for others meanwhile."""
        reason, headers = "load", {}
        if _asks_to_unload(self.fields.keep_alive):
            reason, headers = "unload", warning_header((), (), ["keep_alive"])
        return Response(self._reply.loaded(reason), headers=headers, media_type="application/json")


class OllamaChatTranslator(OllamaTranslator[OllamaChatRequest]):
    """A conversation to answer."""

    protocol = "ollama_chat"
    is_chat = True

    async def prepare(self, model: TextModel) -> Response | None:
        if not self.fields.messages:
            return self._loaded()
        self._prompt = parse_chat(self.fields, model)
        return None


class OllamaGenerateTranslator(OllamaTranslator[OllamaGenerateRequest]):
    """A text to continue, or a question."""

    protocol = "ollama_generate"
    is_chat = False

    async def prepare(self, model: TextModel) -> Response | None:
        fields = self.fields
        if not fields.prompt:
            return self._loaded()
        if fields.images and (fields.raw or fields.suffix or fields.context):
            raise invalid("images", "images must be left out with raw, suffix and context; use /api/chat")
        if fields.raw or fields.suffix:
            self._prompt = fields.prompt
        else:
            memory = GenerateMemory(model, fields)
            self._prompt, self._reply.recall = await memory.prompt(), memory.context
        return None

    def parse(self, base: TextRequest) -> list[TextRequest]:
        suffix = self.fields.suffix
        return super().parse(msgspec.structs.replace(base, prompt_form=PromptForm(suffix=suffix)) if suffix else base)


def _sampling(options: Options) -> dict[str, Any]:
    """Return the sampling fields, each within its range: Ollama takes the nearest value of one outside."""
    sampling = {name: getattr(options, name) for name in _SAME_NAMES} | {
        "repetition_penalty": options.repeat_penalty,
        "top_k": 0 if options.top_k == -1 else options.top_k,
    }
    if options.repeat_last_n == 0:
        sampling |= dict.fromkeys(_PENALTIES)
    for name, highest in _BOUNDED:
        if sampling[name] is not None:
            sampling[name] = min(max(sampling[name], 0.0), highest)
    if sampling["top_p"] == 0.0:  # the likeliest token alone, as Ollama keeps at least one
        sampling |= {"top_p": None, "top_k": 1}
    return drop_random_seed({name: value for name, value in sampling.items() if value is not None})


def _asks_to_unload(keep_alive: object) -> bool:
    """Whether a request without a prompt would have Ollama unload the model: it stays for no second."""
    if isinstance(keep_alive, str):
        return _NO_TIME.fullmatch(keep_alive) is not None
    return isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool) and keep_alive == 0


def _grammar(sent: str | dict[str, Any]) -> Grammar:
    if isinstance(sent, str):
        return Grammar(GrammarKind.JSON_OBJECT)
    return Grammar(GrammarKind.JSON_SCHEMA, json_text(sent))


def parse_chat(fields: OllamaChatRequest, model: TextModel) -> Conversation:
    """Return the conversation to answer. The answer goes on with a last turn of the assistant. Raises INVALID for a bad
    tool or turn, and for thinking that `model` cannot do."""
    messages = fields.messages or []
    is_begun = bool(messages) and messages[-1].role == "assistant"
    if is_begun:
        _check_begun(messages[-1], f"messages[{len(messages) - 1}]")
    tools = fields.tools or []
    offered = offered_tools([tool.function.name for tool in tools], "tools[{}].function.name")
    options = TemplateOptions(
        tools=tuple(tool.model_dump(exclude_none=True) for tool in offered.of(tools)),
        arguments=_thinking_arguments(fields, model),
        adds_generation_prompt=not is_begun,
        continues_final_message=is_begun,
    )
    notes = list(offered.notes)
    return Conversation(tuple(_parse_turns(messages, notes)), options, tuple(notes))


def _check_begun(answer: OllamaMessage, place: str) -> None:
    """Raise INVALID for a last turn of the assistant that an answer cannot go on with."""
    if answer.tool_calls:
        raise invalid(f"{place}.tool_calls", f"{place}.tool_calls must be followed by their results")


def _parse_turns(messages: Sequence[OllamaMessage], notes: list[str]) -> Iterator[ChatMessage]:
    """Yield the turns, and note what is read otherwise than it was sent. Results of tools belong to the calls before
    them, in their order where they do not say to which: Ollama's calls need no ids."""
    unanswered: list[ToolCall] = []
    for index, message in enumerate(messages):
        path, content = f"messages[{index}]", message.content or ""
        if message.tool_calls and message.role != "assistant":
            raise invalid(f"{path}.tool_calls", f"{path}.tool_calls needs the role assistant, got {message.role}")
        if message.images and message.role != "user":
            raise invalid(f"{path}.images", f"{path}.images needs the role user, got {message.role}")
        if message.role == "tool":
            call = _find_call(message, unanswered)
            if call is None:
                notes.append(f"{path} follows no call of which it may be the result")
                yield ChatMessage(
                    "tool", content, tool_call_id=message.tool_call_id or "", name=message.tool_name or ""
                )
                continue
            unanswered.remove(call)
            yield ChatMessage("tool", content, tool_call_id=call.id, name=call.name)
            continue
        if message.content is None and message.role != "assistant":
            notes.append(f"{path}.content null is read as no text")
        calls = tuple(
            ToolCall(call.id or f"call_{index}_{number}", call.function.name, json_text(call.function.arguments))
            for number, call in enumerate(message.tool_calls or ())
        )
        unanswered = list(calls)
        parts = _with_images(content, message.images or (), f"{path}.")
        yield ChatMessage(message.role, content, reasoning=message.thinking or "", tool_calls=calls, parts=parts)


def _with_images(text: str, images: Sequence[str], path: str) -> tuple[str | ImagePart, ...]:
    """Return the parts of a turn with images, none of one without: Ollama has no places for them in the text."""
    found = [ImagePart(f"data:;base64,{each}", f"{path}images[{number}]") for number, each in enumerate(images)]
    return (*found, text) if found else ()


def _find_call(result: OllamaMessage, calls: Sequence[ToolCall]) -> ToolCall | None:
    """Return the call that a tool's turn answers: by its id, else the first of its function, else the first."""
    if result.tool_call_id is not None:
        return next((call for call in calls if call.id == result.tool_call_id), None)
    named = (call for call in calls if result.tool_name in (None, call.name))
    return next(named, None)


def _thinking_arguments(fields: AnswerRequest, model: TextModel) -> dict[str, Any]:
    """Return the variables of the chat template that switch the reasoning on and off."""
    if fields.think is None:
        return {}
    plain = TextRequest(request_id="", prompt=Conversation((ChatMessage("user", ""),)))
    if fields.think and model.chat_reader(plain) is None:
        raise invalid("think", f"think must be false, got {json.dumps(fields.think)}: {fields.model!r} does not think")
    effort = {EFFORT_ARGUMENT: fields.think} if isinstance(fields.think, str) else {}
    return dict.fromkeys(THINKING_SWITCHES, bool(fields.think)) | effort


class GenerateMemory:
    """The conversation of `/api/generate`: a client sends it as token ids, and gets it back with the new turns."""

    def __init__(self, model: TextModel, fields: OllamaGenerateRequest) -> None:
        self._model = model
        self._earlier = fields.context or []
        system = [ChatMessage("system", fields.system)] if fields.system else []
        text = fields.prompt or ""
        self._parts = _with_images(text, fields.images or (), "")
        self._turns = (*system, ChatMessage("user", text, parts=self._parts))
        self._options = TemplateOptions(arguments=_thinking_arguments(fields, model))

    async def prompt(self) -> Conversation | EncodedPrompt:
        """Return what the model answers. Raises INVALID for a context that it cannot take."""
        asked = Conversation(self._turns, self._options)
        if not self._earlier:
            return asked
        encoded = await self._encode(asked)
        if encoded is None:
            raise invalid("context", f"model {self._model.name!r} takes no context: it is a pipeline; use /api/chat")
        return EncodedPrompt(asked, encoded)

    async def context(self, answer: str) -> list[int] | None:
        """Return the token ids of the conversation up to the end of `answer`; None where the model gives none."""
        if self._parts:  # token ids have no images
            return None
        turns = (*self._turns, ChatMessage("assistant", answer))
        try:
            whole = msgspec.structs.replace(self._options, adds_generation_prompt=False)
            return await self._encode(Conversation(turns, whole))
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
