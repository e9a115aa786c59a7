"""An LLM in a Python program, without a server: `from sluice import LLM`."""

import asyncio
import itertools
import re
import threading
import weakref
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, overload

import msgspec

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig
from sluice.engine.types import SamplingParams
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.llm.checkpoint import find_checkpoint, model_name
from sluice.pipelines.llm.services import ChatSettings
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.text.stream import Called
from sluice.pipelines.text.types import (
    ChatMessage,
    Conversation,
    EncodedPrompt,
    Prompt,
    SamplingOverrides,
    TextEvent,
    TextLogprob,
    TextRequest,
)
from sluice.serving.task_model import gather_all

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)

MAX_TOKENS = 16
"""Most tokens of a continuation whose request says nothing else, as in OpenAI's API and in vLLM."""
_STOP_TIMEOUT_S = 20.0
_NUMBERS = itertools.count(1)
_PATH = re.compile(r" - at `\$\.?(\w*).*`$")
"""The end of a message of msgspec, with the field's name."""


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated text. `token_ids` include the token that ended it, if one did. `finish_reason` is "stop" or
    "length"; `stop_reason` is the stop string or stop token that matched. `logprobs` has an entry for each token where
    they were requested."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: list[TextLogprob] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `outputs` has one entry; `text`, `token_ids` and `finish_reason` are that entry's."""

    prompt: Prompt
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    """Number of the prompt's tokens that were found in the prefix cache."""

    @property
    def text(self) -> str:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.outputs[0].finish_reason


class LLM:
    """A language model for offline inference, with an engine process of its own.

    It is used like the class of this name in vLLM and in TensorRT-LLM, and answers as the server does:

        from sluice import LLM, SamplingParams

        with LLM("models/rill") as llm:
            for output in llm.generate(["Once upon a time", "The sea"], max_tokens=32, temperature=0):
                print(output.prompt, output.text, output.finish_reason)
            print(llm.generate("Hello", SamplingParams(max_tokens=8, top_p=0.9)).token_ids)
            print(llm.chat([{"role": "user", "content": "Hello!"}]).text)

    All prompts of a call are batched in flight, and so are the calls of several threads. A prompt is text or a list of
    token ids. A single prompt gets a `RequestOutput`, a list of prompts gets a list of them in the same order.

    Sampling fields are given by name, over the model's own defaults, or as `SamplingParams`, which replace those
    defaults; names given beside it win. Every failure is a `SluiceError`, whose `param` names the field at fault; the
    first one ends the call. The engine ends with `close`, with the context, with the last reference to the object or
    with the interpreter, whichever is first.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        allow_special_tokens: bool = False,
        **engine_options: Any,
    ) -> None:
        """Load the model, which takes seconds to minutes.

        `model` is what `sluice serve` takes: the folder of a checkpoint, or of a model in a model repository, whose
        highest version is loaded; ORG/NAME on the Hugging Face hub; None or "rill" for the model that comes with
        Sluice. `tokenizer` is a folder, for a tokenizer that is elsewhere. With `allow_special_tokens` messages that
        spell special tokens (`<|end|>`) have them.
        `engine_options` are fields of `EngineConfig`: `max_num_seqs=8`, `tensor_parallel_size=2`. Raises SluiceError.
        """
        path = None if model is None else str(Path(model).expanduser())
        checkpoint = find_checkpoint(path, "model", engine_options.get("engine_python"))
        options = {**engine_options, "model_path": str(checkpoint)}
        if tokenizer is not None:
            options["tokenizer_path"] = str(tokenizer)
        self._engine = _EngineThread(_build(EngineConfig, options, "engine option"))
        self._close = weakref.finalize(self, self._engine.close)  # at the interpreter's exit too
        try:
            self._engine.run(self._engine.load(model_name(checkpoint), allow_special_tokens))
        except BaseException:
            self.close()
            raise

    @overload
    def generate(
        self, prompts: str | list[int], sampling_params: SamplingParams | None = None, **overrides: Any
    ) -> RequestOutput: ...

    @overload
    def generate(
        self, prompts: list[str] | list[list[int]], sampling_params: SamplingParams | None = None, **overrides: Any
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: str | list[int] | list[str] | list[list[int]],
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Continue a prompt, or each of several. Beside sampling fields, `overrides` may have `stop` and `bad_words`,
        each a string or several. `max_tokens` is 16 unless given."""
        options = _parse_options(sampling_params or {}, overrides)
        options = msgspec.structs.replace(options, default_max_tokens=MAX_TOKENS)
        if _is_prompt(prompts):
            return self._answer([prompts], options)[0]
        for index, prompt in enumerate(prompts):
            if not _is_prompt(prompt):
                raise invalid("prompts", f"prompts[{index}] must be text or a list of token ids, got {prompt!r:.60}")
        return self._answer(prompts, options)

    @overload
    def chat(
        self, messages: Sequence[Mapping[str, str]], sampling_params: SamplingParams | None = None, **overrides: Any
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | None = None,
        **overrides: Any,
    ) -> RequestOutput | list[RequestOutput]:
        """Answer a conversation, or each of several. A message has a `role` and a `content`. The arguments are those of
        `generate`, but `max_tokens` is all that the context leaves unless given."""
        options = _parse_options(sampling_params or {}, overrides)
        if all(isinstance(message, Mapping) for message in messages):
            return self._answer([_parse_conversation(messages)], options)[0]
        return self._answer([_parse_conversation(each) for each in messages], options)

    def close(self) -> None:
        """End the engine and free its memory. Calls that are under way end in an error. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, prompts: Sequence[Any], options: TextRequest) -> list[RequestOutput]:
        requests = [
            msgspec.structs.replace(options, request_id=f"offline-{next(_NUMBERS)}", prompt=prompt)
            for prompt in prompts
        ]
        return self._engine.run(self._engine.answer(requests))


class _OfflineText(LlmText):
    """Keeps each generation's stream while it is open, for its token ids."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.streams: dict[str, GenerationStream] = {}

    def submit(
        self,
        request: TextRequest,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        predicted: Sequence[int] = (),
        weight: float | None = None,
        resumed: Sequence[int] = (),
    ) -> GenerationStream:
        stream = super().submit(request, prompt, sampling, predicted, weight, resumed)
        self.streams[request.request_id] = stream
        return stream

    async def answer(self, request: TextRequest) -> RequestOutput:
        events: list[TextEvent] = []
        try:
            await self.generate(request, Called(events.append))
            stream = self.streams[request.request_id]
        finally:
            self.streams.pop(request.request_id, None)
        end, text = events[-1], "".join([event.text for event in events])
        assert end.finish_reason is not None
        logprobs: list[TextLogprob] | None = None
        for event in events:
            if event.detail is not None and event.detail.logprobs is not None:
                logprobs = [*(logprobs or ()), *event.detail.logprobs]
        token_ids = stream.output_token_ids[: end.completion_tokens]
        output = CompletionOutput(0, text, token_ids, end.finish_reason.value, end.stop_reason, logprobs)
        return RequestOutput(request.prompt, stream.request.prompt_token_ids, [output], end.cached_tokens)


class _EngineThread:
    """An engine and its text model on a thread's event loop. It must not keep its LLM from being collected."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        # A thread that is no daemon would be waited for before anything closes it.
        self._thread = threading.Thread(target=self._loop.run_forever, name="sluice-llm", daemon=True)
        self._thread.start()
        self._engine: ProcessEngineClient | None = None
        self._text: _OfflineText | None = None
        self._is_closed = False

    def run(self, work: Coroutine[None, None, T]) -> T:
        """Return the result of `work` on the loop. An exception here, such as Ctrl-C, cancels it."""
        if self._is_closed:
            work.close()
            raise SluiceError(ErrorCode.UNAVAILABLE, "this LLM is closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def load(self, name: str, allows_special_tokens: bool) -> None:
        """Start the engine and read the tokenizer meanwhile. Raises SluiceError."""
        engine = self._engine = ProcessEngineClient(self._config)
        await gather_all([engine.start(), self._load_text(name, engine, allows_special_tokens)])

    async def _load_text(self, name: str, engine: ProcessEngineClient, allows_special_tokens: bool) -> None:
        path = Path(self._config.model_path)
        self._text = await asyncio.to_thread(
            load_text,
            _OfflineText,
            name,
            path,
            engine,
            tokenizer_path=Path(self._config.tokenizer_path or path),
            chat=ChatSettings(allows_special_tokens),
        )
        # The engine rejects what its queue cannot hold, so further requests wait here.
        self._places = asyncio.Semaphore(self._config.max_num_seqs + self._config.max_queued_requests // 2)

    async def answer(self, requests: Sequence[TextRequest]) -> list[RequestOutput]:
        """Answer `requests`, in order. The first failure cancels the others."""
        return await gather_all([self._answer_one(request) for request in requests])

    async def _answer_one(self, request: TextRequest) -> RequestOutput:
        assert self._text is not None
        async with self._places:
            return await self._text.answer(request)

    def close(self) -> None:
        """End the engine, then the loop and the thread."""
        self._is_closed = True
        try:
            asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(_STOP_TIMEOUT_S)
        except TimeoutError:
            if self._engine is not None:
                self._engine.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_STOP_TIMEOUT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _stop(self) -> None:
        if self._engine is not None:
            await self._engine.stop()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def _is_prompt(value: object) -> bool:
    """Whether `value` is one prompt: text, or token ids."""
    if isinstance(value, str):
        return True
    return isinstance(value, list) and bool(value) and all(isinstance(each, int) for each in value)


def _parse_conversation(messages: object) -> Conversation:
    try:
        return Conversation(msgspec.convert(messages, tuple[ChatMessage, ...]))
    except msgspec.ValidationError as error:
        raise invalid("messages", f"messages: {error}") from None


def _parse_options(params: SamplingParams | SamplingOverrides, overrides: Mapping[str, Any]) -> TextRequest:
    """Return a request without a prompt, with the `overrides` over `params`."""
    fields = dict(params) if isinstance(params, dict) else msgspec.structs.asdict(params)
    if fields.pop("bad_words", ()):
        raise invalid("bad_words", "bad_words of SamplingParams are token ids; give bad_words by name, as strings")
    fields |= overrides
    stop, bad_words = (_parse_strings(name, fields.pop(name, None)) for name in ("stop", "bad_words"))
    given = {name: value for name, value in fields.items() if value is not None}
    checked = _build(SamplingParams, given, "sampling field")
    sampling = {name: getattr(checked, name) for name in given}
    return TextRequest(request_id="", prompt="", sampling=sampling, stop=stop, bad_words=bad_words)


def _parse_strings(name: str, value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value or ()
    try:
        return msgspec.convert(strings, tuple[str, ...])
    except msgspec.ValidationError:
        raise invalid(name, f"{name} must be a string or several, got {value!r:.60}") from None


def _build(kind: type[StructT], fields: Mapping[str, Any], what: str) -> StructT:
    """Return the struct with these fields, checked. Raises INVALID, by name, for an unknown one or another type."""
    for name in fields:
        if name not in kind.__struct_fields__:
            raise invalid(name, f"{name} is no {what}; those there are: {', '.join(kind.__struct_fields__)}")
    try:
        return msgspec.convert(dict(fields), kind)
    except msgspec.ValidationError as error:
        at = _PATH.search(str(error))
        name = at[1] if at else ""
        raise invalid(name, f"{name}: {_PATH.sub('', str(error))}") from None
