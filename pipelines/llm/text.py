"""An LLM's text model: text, conversations or token ids in, text out, over the engine that runs the checkpoint."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from sluice.engine.arrays import FloatArray
from sluice.engine.client.stream import Consumer, GenerationStream
from sluice.engine.client.supervision import build_resumed_request
from sluice.engine.fleet.client import Engine
from sluice.engine.types import EngineInfo, GenerateRequest, SamplingParams, TokenEvent
from sluice.engine.validation import num_tokens_after
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.files import files_mark
from sluice.pipelines.chat.formats import parse_tools
from sluice.pipelines.chat.registry import NO_FORMATS, ChatFormats
from sluice.pipelines.llm.activity import TextActivity, wait_for_engine
from sluice.pipelines.llm.chat_answers import (
    AnswerSettings,
    answer_settings,
    called_functions,
    conversation_tools,
    relaxed_tools,
    with_structural_tag,
)
from sluice.pipelines.llm.pooling import (
    EmbeddingSettings,
    build_embedding_request,
    read_embedding_settings,
    read_hidden_states,
)
from sluice.pipelines.llm.services import ChatSettings
from sluice.pipelines.llm.tape import Tape, TapedGeneration, TextTape, current_tape
from sluice.pipelines.llm.tokens import StopSequences, TokenPieces, TokenSequences
from sluice.pipelines.text.logprobs import PromptEcho, track_logprobs
from sluice.pipelines.text.model import (
    digest_session,
    fingerprint_of,
    leave_out_images,
    refuse_images,
    refuse_parameters,
)
from sluice.pipelines.text.sampling import (
    SamplingDefaults,
    add_end,
    add_words,
    default_max_tokens,
    drop_neutral_fields,
)
from sluice.pipelines.text.sessions import PromptWatch
from sluice.pipelines.text.stream import (
    Called,
    Feed,
    ObserveDetail,
    OpenRecord,
    StreamRecord,
    TextEvents,
    TextStream,
    measure,
    no_record,
    salted_form,
    sent_prompt,
    timed_feed,
)
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import (
    AS_IT_IS,
    ChatReader,
    Conversation,
    EncodedPrompt,
    Prompt,
    PromptForm,
    SamplingOverrides,
    TextEvent,
    TextRequest,
)
from sluice.record.spans import span

_TOOL_CHARS = 64
"""Characters that a tool counts for where its grammar is written."""


class TextOrigin(NamedTuple):
    """The origin of a loaded text model: the folders of checkpoint and tokenizer, and the settings of its chats."""

    checkpoint: Path
    tokenizer: Path
    chat: ChatSettings


class _Output(NamedTuple):
    """How one request's tokens are sampled, and what the events of its answer are made of them. The first event has
    `prompt_end`, for a `ChatReader`, and the `echo` of the prompt."""

    sampling: SamplingParams
    feed: Feed
    prompt_end: str = ""
    echo: PromptEcho | None = None


_Plan = Callable[[TextRequest, list[int]], Awaitable[_Output]]


class LlmText:
    """The text model of a checkpoint: its tokenizer and sampling defaults over its engine. Only the event loop of the
    engine's client uses it."""

    takes_parameters = False
    parent = None

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        engine: Engine,
        defaults: SamplingDefaults,
        *,
        created: int,
        version: str = "1",
        formats: ChatFormats = NO_FORMATS,
        media_domains: Sequence[str] = (),
        origin: TextOrigin | None = None,
        open_record: OpenRecord = no_record,
    ) -> None:
        """`formats` are those of its answers in a chat. Images come from `media_domains`. `origin` is None where it was
        not loaded from a folder. `open_record` opens the measurements of each request."""
        self.files = "" if origin is None else files_mark(origin.checkpoint)
        """A mark of the checkpoint's files when it was loaded."""
        self.name = name
        self.version = version
        self.created = created
        """When the checkpoint was made, in seconds since 1970."""
        self.engine = engine
        self.defaults = defaults
        self.tokenizer = tokenizer
        self.template_names = tokenizer.template_names
        self.formats = formats
        self._media_domains = media_domains
        self.origin = origin
        self.activity = TextActivity()
        self._open_record = open_record

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded engine. Raises SluiceError UNAVAILABLE before it has started."""
        return self.engine.info

    @property
    def fingerprint(self) -> str:
        """Changes with the model, its version and the settings that its answers depend on."""
        return self._make_fingerprint() if self.engine.is_asleep else self._fingerprint_awake

    @cached_property
    def _fingerprint_awake(self) -> str:
        return self._make_fingerprint()

    def _make_fingerprint(self) -> str:
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
    def max_images(self) -> int:
        """Most images of a prompt; 0 where it takes text alone."""
        return len(self.info.image_placeholders)

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it lives."""
        return self.engine.failure

    def adapt(self, conversation: Conversation) -> Conversation:
        """Return a conversation as the model and its chat template take it, as `TextModel.adapt`."""
        if any(each.parts for each in conversation.messages) and not self.info.image_placeholders:
            conversation = leave_out_images(conversation, f": model '{self.name}' takes text alone")
        return self.tokenizer.note_forms(conversation)

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> EncodedPrompt:
        """Return the prompt with its token ids and images. Raises as `prepare`, and INVALID for images that cannot be
        taken."""
        if isinstance(prompt, EncodedPrompt):
            return prompt
        images: tuple[bytes, ...] = ()
        if isinstance(prompt, Conversation) and any(each.parts for each in prompt.messages):
            images = await self._load_images(prompt)
        return EncodedPrompt(prompt, await self.prepare(prompt, form), images)

    async def prepare(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> list[int]:
        """Return the prompt's token ids, with placeholders of its images. Raises as `Tokenizer.encode_prompt`."""
        if isinstance(prompt, Conversation) and self.info.image_placeholders:
            options = msgspec.structs.replace(prompt.options, image_placeholders=self.info.image_placeholders)
            prompt = Conversation(prompt.messages, options)
        with span("tokenize") as noted:
            token_ids = await self.tokenizer.encode_prompt(prompt, form, self.max_model_len)
            if noted is not None:
                noted.attributes["sluice.tokens"] = len(token_ids)
        return token_ids

    async def _load_images(self, conversation: Conversation) -> tuple[bytes, ...]:
        images, most = conversation.images, self.max_images
        if not most:
            refuse_images(conversation, f": model '{self.name}' takes text alone")
        if len(images) > most:
            path = images[most].path
            raise invalid(path, f"{path} is one image too many: a prompt of model '{self.name}' has at most {most}")
        self.engine.refuse_if_full()
        try:
            from sluice.pipelines.text.images import load_images
        except ImportError as error:
            message = f"images need Pillow, which is not here ({error}): pip install 'sluice[images]'"
            raise SluiceError(ErrorCode.UNIMPLEMENTED, message) from None
        return await load_images(images, self._media_domains)

    def chat_reader(self, request: TextRequest) -> ChatReader | None:
        """Return a reader of one answer, None for one of text alone. Raises INVALID for tools that it cannot take."""
        prompt = sent_prompt(request.prompt)
        if not isinstance(prompt, Conversation) or not self._is_read(request):
            return None
        tools = parse_tools(prompt.options.tools)
        called = () if tools else called_functions(prompt)
        relaxed = partial(relaxed_tools, tools, self.info)
        return self.formats.reader(tools, choice=request.tool_choice, relaxed=relaxed, called=called)

    async def warm_up(self) -> None:
        """Generate one token as for a client, but outside the metrics. Raises the error that a client would get. The
        prompt is a token id, because no text can be encoded by every tokenizer."""
        if self.info.embedding_size:
            assert self.embedding_settings, "read now, for their errors"
            await self.hidden_states([0])
            return
        request = TextRequest(request_id="warm-up", prompt=[0], sampling=SamplingOverrides(max_tokens=1))
        events = list[TextEvent]()
        try:
            await self.generate(request, Called(events.append), is_counted=False)
        except SluiceError as error:
            raise SluiceError(error.code, f"the model failed when it was tried: {error.message}") from error
        if not any(event.num_tokens for event in events):
            raise SluiceError(ErrorCode.UNAVAILABLE, "the model generated nothing when it was tried")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being generated."""
        return self.activity.texts.count == 0

    async def wait_idle(self) -> None:
        """Wait until nothing is being generated."""
        await self.activity.texts.wait_idle()

    async def generate(
        self,
        request: TextRequest,
        consumer: Consumer[TextEvent],
        on_detail: ObserveDetail | None = None,
        *,
        is_counted: bool = True,
    ) -> None:
        """Generate text as `TextModel.generate` does. `on_detail` gets the details of the engine's events before the
        text event that they lead to. A request that is not counted is not measured."""
        await self._generate(request, consumer, self._as_text, on_detail, is_counted=is_counted)

    async def replay(self, request: TextRequest, events: Sequence[TokenEvent], consumer: Consumer[TextEvent]) -> None:
        """Push what `generate` would make of an answer's tokens that are known, as far as they go. The engine gets no
        request, and nothing is counted."""
        tape = Tape(lambda number, event: None, [(0, event) for event in events], goes_on=False)
        reset = current_tape.set(tape)
        try:
            await self.generate(request, consumer, is_counted=False)
        finally:
            current_tape.reset(reset)

    async def generate_tokens(
        self,
        request: TextRequest,
        consumer: Consumer[TextEvent],
        stop: TokenSequences = (),
        bad: TokenSequences = (),
        on_detail: ObserveDetail | None = None,
    ) -> None:
        """Generate `TokenPiece`s up to and including the first of the `stop` sequences, without any of the `bad` ones.
        Otherwise as `generate`, but stop strings of `request` are not searched."""

        async def as_tokens(request: TextRequest, token_ids: list[int]) -> _Output:
            sampling = await self.sampling(request, len(token_ids))
            if bad:
                sampling = msgspec.structs.replace(sampling, bad_words=(*sampling.bad_words, *bad))
            return _Output(sampling, TokenPieces(len(token_ids), StopSequences(stop, sampling.min_tokens)).feed)

        await self._generate(request, consumer, as_tokens, on_detail)

    async def _generate(
        self,
        request: TextRequest,
        consumer: Consumer[TextEvent],
        plan: _Plan,
        on_detail: ObserveDetail | None,
        *,
        is_counted: bool = True,
    ) -> None:
        """Generate what `plan` makes of a request and of its prompt's token ids."""
        measured, tape = self._measure(request, is_counted=is_counted), current_tape.get()
        taped = None if tape is None else TextTape(tape)
        with self.activity.texts, default_max_tokens(request), measured as record:
            if request.parameters:
                refuse_parameters(self.name, request)
            if self.engine.is_asleep:
                request = await wait_for_engine(self.engine, request)
            prompt = await self.prepare_shared(request.prompt, salted_form(request))
            output = await plan(request, prompt.token_ids)
            predicted = await self.tokenizer.encode_prediction(request.prediction, self.max_model_len)
            weight = await record.admit(len(prompt.token_ids), output.sampling.max_tokens, request.adapter)
            watch = self._watch(request, prompt, record) if request.session else None
            events = TextEvents(
                output.feed,
                record,
                consumer,
                prompt_end=output.prompt_end,
                echo=output.echo,
                is_echo_alone=request.sampling.get("max_tokens") == 0,
                on_detail=on_detail,
                on_end=self.activity.count_answer if is_counted else None,
                watch=watch,
            )

            def start(resumed: Sequence[int] = ()) -> AbstractContextManager[GenerationStream]:
                return self.activity.follow(self.submit(request, prompt, output.sampling, predicted, weight, resumed))

            with start() if taped is None else nullcontext(TapedGeneration(taped, start)) as generation:
                events.stop_generation = generation.stop
                await generation.pass_to(events)

    async def _as_text(self, request: TextRequest, token_ids: list[int]) -> _Output:
        """Plan an answer as text, in the formats of the model's chats where it has a reader."""
        sampling, form, prompt_end, _ = await self.settings(request, token_ids)
        echo = await self._echo(request, token_ids) if request.echo else None
        has_logprobs = sampling.logprobs is not None or sampling.prompt_logprobs is not None
        stream = TextStream(
            self.tokenizer.detokenizer(form),
            request.stop,
            sampling,
            len(token_ids),
            track_logprobs(sampling, self.tokenizer, token_ids, echo) if has_logprobs else None,
            includes_stop=request.form.include_stop_str_in_output,
            prompt_token_ids=token_ids if request.form.return_token_ids else None,
            notes_starts=bool(prompt_end),
        )
        return _Output(sampling, timed_feed(stream.feed), prompt_end, echo)

    def _measure(self, request: TextRequest, *, is_counted: bool) -> AbstractContextManager[StreamRecord]:
        open_record = self._open_record if is_counted else no_record
        return measure(open_record(self.name, request.protocol))

    def _watch(self, request: TextRequest, prompt: EncodedPrompt, record: StreamRecord) -> PromptWatch | None:
        """Return what finds out why the prompt of a session was computed again."""
        key = digest_session(request.tenant, request.session)
        find_replica = partial(self.engine.session_replica, key)
        return record.watch(key, self.name, request, prompt, self.info.block_size, find_replica)

    @cached_property
    def embedding_settings(self) -> EmbeddingSettings:
        """The settings of an engine that embeds. Raises as `read_embedding_settings`."""
        if self.origin is None or self.info.gives_scores:
            return EmbeddingSettings()
        return read_embedding_settings(self.origin.checkpoint, is_pooled=self.info.is_pooled)

    async def hidden_states(
        self, token_ids: list[int], *, whole: bool = False, second_text_start: int = 0
    ) -> FloatArray:
        """Return the hidden states [num_tokens, embedding_size] of `token_ids`, the last one alone unless `whole`, of
        an engine that embeds; or what another brings in their place, its one vector or score. Raises the engine's
        refusals and failures."""
        request = build_embedding_request(token_ids, whole=whole, second_text_start=second_text_start)
        await self.engine.wait_awake()
        with self.activity.texts, self.activity.follow(self.engine.submit(request)) as generation:
            return await read_hidden_states(generation, self.info.embedding_size)

    def submit(
        self,
        request: TextRequest,
        prompt: EncodedPrompt,
        sampling: SamplingParams,
        predicted: Sequence[int] = (),
        weight: float | None = None,
        resumed: Sequence[int] = (),
    ) -> GenerationStream:
        """Submit `request` to the engine and return its token events, in which stop strings are not searched. `weight`
        is its tenant's; tokens that were `resumed` come before those of the events."""
        if self.info.embedding_size:
            kind, route = ("scores", "/v1/score") if self.info.gives_scores else ("embeddings", "/v1/embeddings")
            raise invalid("model", f"model '{self.name}' gives {kind} and no text; POST {route}")
        try:
            submitted = GenerateRequest(
                request_id=request.request_id,
                prompt_token_ids=prompt.token_ids,
                sampling=add_end(sampling, self.tokenizer.eos_token_id, self.info),
                priority=request.priority,
                tenant=request.tenant,
                weight=weight,
                cache_salt=request.cache_salt,
                session=digest_session(request.tenant, request.session),
                timeout_s=request.timeout_s,
                queue_timeout_s=request.queue_timeout_s,
                adapter=request.adapter,
                predicted_token_ids=[*predicted],
                returns_metrics=request.returns_metrics,
                returns_context_logits=request.returns_context_logits,
                returns_generation_logits=request.returns_generation_logits,
                images=[*prompt.images],
                fits_context=bool(prompt.images) and request.sampling.get("max_tokens") is None,
            )
            if resumed:
                submitted = build_resumed_request(submitted, resumed, 0.0, has_started=True)
            return self.engine.submit(submitted)
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

    async def settings(self, request: TextRequest, token_ids: list[int]) -> AnswerSettings:
        """Return how the answer to a prompt of `token_ids` is generated. Raises INVALID for what the model cannot
        do."""
        sampling = await self.sampling(request, len(token_ids))
        if self._is_read(request):
            work = partial(answer_settings, request, token_ids, sampling, self.formats, self.tokenizer, self.info)
            return await self.tokenizer.run(_TOOL_CHARS * len(conversation_tools(request)), work)
        return AnswerSettings(sampling, request.form, "")

    async def _echo(self, request: TextRequest, token_ids: list[int]) -> PromptEcho:
        prompt = sent_prompt(request.prompt) if request.prompt_form.truncate_prompt_tokens is None else token_ids
        return await self.tokenizer.run(len(token_ids), lambda: PromptEcho(self.tokenizer, prompt, token_ids))

    def _is_read(self, request: TextRequest) -> bool:
        """Whether answers to the request have a `ChatReader`."""
        prompt = sent_prompt(request.prompt)
        if not isinstance(prompt, Conversation):
            return False
        is_offered = bool(prompt.options.tools or self.formats.reasoning)
        return is_offered or (self.formats.tools is not None and any(each.tool_calls for each in prompt.messages))
