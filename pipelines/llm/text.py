"""An LLM's text model: text, conversations or token ids in, text out, over the engine that runs the checkpoint."""

from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple, Self

import msgspec

from engine.client.base import EngineClient
from engine.client.stream import GenerationStream
from engine.runners.base import FloatArray
from engine.types import EngineInfo, EventDetail, GenerateRequest, SamplingParams
from pipelines.chat.registry import NO_FORMATS, ChatFormats, find_formats
from pipelines.llm.chat_answers import answer_settings, relaxed_tools, with_structural_tag
from pipelines.llm.pooling import (
    EmbeddingSettings,
    build_embedding_request,
    read_embedding_settings,
    read_hidden_states,
)
from pipelines.llm.services import DEFAULT_CHAT, ChatSettings
from pipelines.text.logprobs import PromptEcho, track_logprobs
from pipelines.text.model import UNCOUNTED, fingerprint_of, refuse_parameters
from pipelines.text.parts import ChatReader
from pipelines.text.sampling import (
    SamplingDefaults,
    add_end,
    add_words,
    client_max_tokens,
    drop_neutral_fields,
    load_sampling_defaults,
    num_tokens_after,
)
from pipelines.text.stream import (
    OpenRecord,
    OpenTexts,
    StreamRecord,
    TextStream,
    check_complete,
    measure,
    no_record,
    sent_prompt,
    with_prompt_end,
)
from pipelines.text.tokenizer import Tokenizer
from pipelines.text.types import (
    AS_IT_IS,
    Conversation,
    EncodedPrompt,
    Prompt,
    PromptForm,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)
from serving.latencies import Histogram
from sluice.errors import ErrorCode, SluiceError, invalid

ObserveDetail = Callable[[EventDetail], None]
LENGTH_BUCKETS = (10.0, 50.0, 100.0, 500.0, 1000.0)
"""Bounds of the histograms of lengths, in tokens; TensorRT-LLM's."""


class LlmText:
    """The text model of a checkpoint: its tokenizer and sampling defaults over its engine. Only the event loop of the
    engine's client uses it."""

    takes_parameters = False
    parent = None

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        engine: EngineClient,
        defaults: SamplingDefaults,
        *,
        created: int,
        version: str = "1",
        formats: ChatFormats = NO_FORMATS,
        folder: Path | None = None,
        open_record: OpenRecord = no_record,
    ) -> None:
        """`formats` are those of its answers in a chat. `folder` is the checkpoint's. `open_record` opens the
        measurements of each request."""
        self.name = name
        self.version = version
        self.created = created
        """When the checkpoint was made, in seconds since 1970."""
        self.engine = engine
        self.defaults = defaults
        self.tokenizer = tokenizer
        self.template_names = tokenizer.template_names
        self.formats = formats
        self._folder = folder
        self.activity = TextActivity()
        self._open_record = open_record

    @classmethod
    def load(
        cls,
        name: str,
        path: Path,
        engine: EngineClient,
        *,
        tokenizer_path: Path | None = None,
        version: str = "1",
        open_record: OpenRecord = no_record,
        chat: ChatSettings = DEFAULT_CHAT,
    ) -> Self:
        """Read the checkpoint's tokenizer and defaults, which takes most of a second. `engine` may start later. Raises
        UNAVAILABLE where a file in `path` is missing or cannot be read, INVALID for a parser that is not installed."""
        tokenizer = Tokenizer.load(tokenizer_path or path, allows_special_tokens=chat.allows_special_tokens)
        defaults = load_sampling_defaults(path)
        created = int((path / "config.json").stat().st_mtime)
        return cls(
            name,
            tokenizer,
            engine,
            defaults,
            created=created,
            version=version,
            formats=find_formats(tokenizer.chat_template, chat.tool_call_parser, chat.reasoning_parser),
            folder=path,
            open_record=open_record,
        )

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded engine. Raises SluiceError UNAVAILABLE before it has started."""
        return self.engine.info

    @cached_property
    def fingerprint(self) -> str:
        """Changes with the model, its version and the settings that its answers depend on."""
        info = msgspec.structs.replace(self.info, load_seconds=0.0)
        return fingerprint_of(self.name, self.version, self.created, info, sorted(self.defaults.items()))

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.info.max_model_len

    @property
    def max_beam_width(self) -> int:
        return self.info.max_beam_width

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self.engine.failure

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> Prompt:
        """Return the prompt with its token ids. Raises as `prepare`."""
        return prompt if isinstance(prompt, EncodedPrompt) else EncodedPrompt(prompt, await self.prepare(prompt, form))

    async def prepare(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> list[int]:
        """Return the prompt's token ids. Raises as `Tokenizer.encode_prompt`."""
        return await self.tokenizer.encode_prompt(prompt, form, self.max_model_len)

    def chat_reader(self, request: TextRequest) -> ChatReader | None:
        """Return a reader of one answer, None for one of text alone. Raises INVALID for tools that it cannot take."""
        prompt = sent_prompt(request.prompt)
        if not isinstance(prompt, Conversation) or not self._is_read(request):
            return None
        tools = prompt.options.tools
        return self.formats.reader(tools, choice=request.tool_choice, relaxed=partial(relaxed_tools, tools, self.info))

    async def warm_up(self) -> None:
        """Generate one token as for a client, but outside the metrics. Raises the error that a client would get. The
        prompt is a token id, because no text can be encoded by every tokenizer."""
        if self.info.embedding_size:
            assert self.embedding_settings, "read now, for their errors"
            await self.hidden_states([0], whole=False)
            return
        request = TextRequest(request_id="warm-up", prompt=[0], sampling=SamplingOverrides(max_tokens=1))
        try:
            async with aclosing(self._generate(request, UNCOUNTED, is_counted=False)) as events:
                num_tokens = sum([event.num_tokens async for event in events])
        except SluiceError as error:
            raise SluiceError(error.code, f"the model failed when it was tried: {error.message}") from error
        if num_tokens == 0:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the model generated nothing when it was tried")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being generated."""
        return self.activity.texts.count == 0

    async def wait_idle(self) -> None:
        """Wait until nothing is being generated."""
        await self.activity.texts.wait_idle()

    def generate(
        self,
        request: TextRequest,
        while_open: AbstractContextManager[object] = UNCOUNTED,
        on_detail: ObserveDetail | None = None,
    ) -> AsyncGenerator[TextEvent, None]:
        """Generate text as `TextModel.generate` does. `on_detail` gets the details of the engine's events before the
        text event that they lead to."""
        return self._generate(request, while_open, on_detail, is_counted=True)

    async def _generate(
        self,
        request: TextRequest,
        while_open: AbstractContextManager[object],
        on_detail: ObserveDetail | None = None,
        *,
        is_counted: bool,
    ) -> AsyncGenerator[TextEvent, None]:
        measured = self.measure(request, is_counted=is_counted)
        with while_open, self.activity.texts, client_max_tokens(request), measured as record:
            if request.parameters:
                refuse_parameters(self.name, request)
            token_ids = await self.prepare(request.prompt, request.prompt_form)
            sampling = await self.sampling(request, len(token_ids))
            form, prompt_end = request.form, ""
            if self._is_read(request):
                settings = answer_settings(request, token_ids, sampling, self.formats, self.tokenizer, self.info)
                sampling, form, prompt_end = settings
            echo = await self._echo(request, token_ids) if request.echo else None
            has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
            logprobs = track_logprobs(sampling, self.tokenizer, token_ids, echo) if has_logprobs else None
            stream = TextStream(
                self.tokenizer.detokenizer(form),
                request.stop,
                sampling,
                len(token_ids),
                logprobs,
                includes_stop=request.form.include_stop_str_in_output,
                prompt_token_ids=token_ids if request.form.return_token_ids else None,
                notes_starts=bool(prompt_end),
            )
            predicted = await self.tokenizer.encode_prediction(request.prediction, self.max_model_len)
            with self.activity.follow(self.submit(request, token_ids, sampling, predicted)) as generation:
                async for token_event in generation:
                    if on_detail is not None and token_event.detail is not None:
                        on_detail(token_event.detail)
                    event = stream.feed(token_event)
                    if event is None:
                        continue
                    if prompt_end:
                        event, prompt_end = with_prompt_end(event, prompt_end), ""
                    if echo is not None:
                        is_alone = request.sampling.get("max_tokens") == 0
                        event, echo = echo.alone(event) if is_alone else echo.prepend_to(event), None
                    if event.finish_reason is not None:
                        generation.cancel()  # now, not when the reader comes back: a stop string may have ended it
                        check_complete(event)
                        if is_counted:
                            self.activity.count_answer(event.prompt_tokens, event.completion_tokens)
                    record.observe(event)
                    yield event
                    if event.finish_reason is not None:
                        return
                raise AssertionError("the engine's events ended without a finish reason")

    def measure(self, request: TextRequest, *, is_counted: bool = True) -> AbstractContextManager[StreamRecord]:
        """Measure `request` in a context; one that is not counted has no measurements."""
        open_record = self._open_record if is_counted else no_record
        return measure(open_record(self.name, request.protocol))

    @cached_property
    def embedding_settings(self) -> EmbeddingSettings:
        """The settings of an engine that embeds. Raises as `read_embedding_settings`."""
        return EmbeddingSettings() if self._folder is None else read_embedding_settings(self._folder)

    async def hidden_states(self, token_ids: list[int], *, whole: bool) -> FloatArray:
        """Return the hidden states [num_tokens, embedding_size] of `token_ids`, the last one alone unless `whole`, of
        an engine that embeds. Raises the engine's refusals and failures."""
        request = build_embedding_request(token_ids, whole=whole)
        with self.activity.texts, self.activity.follow(self.engine.submit(request)) as generation:
            return await read_hidden_states(generation, self.info.embedding_size)

    def submit(
        self, request: TextRequest, token_ids: list[int], sampling: SamplingParams, predicted: Sequence[int] = ()
    ) -> GenerationStream:
        """Submit `request` to the engine and return its token events, in which stop strings are not searched."""
        if self.info.embedding_size:
            raise invalid("model", f"model '{self.name}' gives embeddings and no text; POST /v1/embeddings")
        try:
            return self.engine.submit(
                GenerateRequest(
                    request_id=request.request_id,
                    prompt_token_ids=token_ids,
                    sampling=add_end(sampling, self.tokenizer.eos_token_id, self.info),
                    priority=request.priority,
                    tenant=request.tenant,
                    cache_salt=request.cache_salt,
                    timeout_s=request.timeout_s,
                    queue_timeout_s=request.queue_timeout_s,
                    adapter=request.adapter,
                    predicted_token_ids=[*predicted],
                    returns_metrics=request.returns_metrics,
                    returns_context_logits=request.returns_context_logits,
                    returns_generation_logits=request.returns_generation_logits,
                )
            )
        except SluiceError as error:
            if error.param == "prompt" and isinstance(sent_prompt(request.prompt), Conversation):
                error.param = "messages"
            raise

    async def sampling(self, request: TextRequest, prompt_tokens: int) -> SamplingParams:
        """Return the sampling parameters of `request`: its own fields over the model's defaults."""
        max_tokens = request.sampling.get("max_tokens")
        if max_tokens is None:
            room = num_tokens_after(prompt_tokens, self.info)
            max_tokens = min(room, request.default_max_tokens or room)
        elif request.echo:
            max_tokens = max(max_tokens, 1)
        sampling = self.defaults.resolve(drop_neutral_fields(request.sampling, self.info.sampling_fields), max_tokens)
        if request.structural_tag:
            sampling = with_structural_tag(sampling, request.structural_tag, self.tokenizer, self.info)
        if not request.bad_words and not request.biased_words:
            return sampling
        return await add_words(sampling, request, self.tokenizer)

    async def _echo(self, request: TextRequest, token_ids: list[int]) -> PromptEcho:
        prompt = sent_prompt(request.prompt) if request.prompt_form.truncate_prompt_tokens is None else token_ids
        return await self.tokenizer.run(len(token_ids), lambda: PromptEcho(self.tokenizer, prompt, token_ids))

    def _is_read(self, request: TextRequest) -> bool:
        """Whether answers to the request have a `ChatReader`."""
        prompt = sent_prompt(request.prompt)
        return isinstance(prompt, Conversation) and bool(prompt.options.tools or self.formats.reasoning)


class Unstarted(NamedTuple):
    """Requests in the engine without a token yet: they wait, or their prefill runs."""

    num_requests: int
    num_prompt_tokens: int


class TextActivity:
    """A model version's open generations, and its lengths of prompts and answers. Only the event loop uses it."""

    def __init__(self) -> None:
        self.prompt_lengths = Histogram(LENGTH_BUCKETS)
        self.output_lengths = Histogram(LENGTH_BUCKETS)
        """Lengths of answered requests, in tokens."""
        self.texts = OpenTexts()
        self._streams: dict[int, GenerationStream] = {}

    @contextmanager
    def follow(self, generation: GenerationStream) -> Iterator[GenerationStream]:
        """Follow a generation until its reader is done with it, and cancel it then."""
        self._streams[generation.stream_id] = generation
        try:
            yield generation
        finally:
            del self._streams[generation.stream_id]
            generation.cancel()

    def count_answer(self, num_prompt: int, num_output: int) -> None:
        """Count an answered request and its lengths in tokens."""
        self.prompt_lengths.add(num_prompt)
        self.output_lengths.add(num_output)

    def unstarted(self) -> Unstarted:
        """Count the requests without a token yet, and their prompts' tokens."""
        lengths = [len(each.request.prompt_token_ids) for each in self._streams.values() if not each.output_token_ids]
        return Unstarted(len(lengths), sum(lengths))
