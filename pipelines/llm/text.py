"""An LLM engine as a model: text or token ids in, text out."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from threading import Lock

import msgspec

from engine.client.base import EngineClient
from engine.client.stream import GenerationStream
from engine.types import EngineInfo, GenerateRequest, SamplingParams
from pipelines.llm.activity import TextActivity
from pipelines.text.bad_words import bad_word_ids
from pipelines.text.biased_words import with_biased_words
from pipelines.text.defaults import SamplingDefaults, load_sampling_defaults
from pipelines.text.echo import PromptEcho
from pipelines.text.logprobs import LogprobTrack
from pipelines.text.model import refuse_parameters
from pipelines.text.runtime_fields import wanted_of_runtime
from pipelines.text.stream import TextStream
from pipelines.text.tokenizer import Tokenizer
from pipelines.text.types import EncodedPrompt, PlainPrompt, Prompt, SamplingOverrides, TextEvent, TextRequest
from sluice.errors import ErrorCode, SluiceError

_LOADING = Lock()
"""transformers imports its parts when they are first asked for, and two threads at that find it half made."""


class LlmText:
    """A checkpoint's text side over the engine that runs it. Used from the engine client's event loop."""

    takes_parameters = False
    is_measured = False
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
    ) -> None:
        self.name = name
        self.version = version
        self.created = created
        """When the checkpoint was made, in seconds since 1970."""
        self.engine = engine
        self.defaults = defaults
        self.tokenizer = tokenizer
        self.activity = TextActivity()

    @classmethod
    def load(
        cls, name: str, path: Path, engine: EngineClient, *, tokenizer_path: Path | None = None, version: str = "1"
    ) -> "LlmText":
        """Read the checkpoint's text side; takes most of a second. `engine` need not have started yet.

        Raises SluiceError UNAVAILABLE where `path` lacks what is needed or holds what cannot be read.
        """
        with _LOADING:
            tokenizer, defaults = Tokenizer.load(tokenizer_path or path), load_sampling_defaults(path)
        created = int((path / "config.json").stat().st_mtime)
        return cls(name, tokenizer, engine, defaults, created=created, version=version)

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises SluiceError UNAVAILABLE before it has started."""
        return self.engine.info

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.info.max_model_len

    @property
    def max_beam_width(self) -> int:
        return self.info.max_beam_width

    @property
    def failure(self) -> str | None:
        """Why the engine is dead; None while it is not."""
        return self.engine.failure

    async def prepare_shared(self, prompt: PlainPrompt) -> Prompt:
        """The prompt with its token ids. Raises as `prepare`."""
        return EncodedPrompt(prompt, await self.prepare(prompt))

    async def prepare(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises SluiceError INVALID; the engine checks length and range of ids."""
        if isinstance(prompt, str):
            return await self.tokenizer.encode_text(prompt)
        if isinstance(prompt, tuple):
            return await self.tokenizer.encode_chat(prompt)
        return prompt.token_ids if isinstance(prompt, EncodedPrompt) else prompt

    async def warm_up(self) -> None:
        """Generate one token as for a client, outside the metrics. Raises what a client would see."""
        request = TextRequest(request_id="warm-up", prompt="Hello", sampling=SamplingOverrides(max_tokens=1))
        try:
            async with aclosing(self._generate(request, is_counted=False)) as events:
                num_tokens = sum([event.num_tokens async for event in events])
        except SluiceError as error:
            raise SluiceError(error.code, f"the model failed when it was tried: {error.message}") from error
        if num_tokens == 0:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the model generated nothing when it was tried")

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being generated."""
        return self.activity.is_idle

    async def wait_idle(self) -> None:
        """Until nothing is being generated."""
        await self.activity.wait_idle()

    def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Generate; the last event has the finish reason. Closing the generator cancels.

        Raises SluiceError at the first event where the request is refused, at a later one where it failed.
        """
        return self._generate(request, is_counted=True)

    async def _generate(self, request: TextRequest, *, is_counted: bool) -> AsyncGenerator[TextEvent, None]:
        refuse_parameters(self.name, request)
        with self.activity.open():
            token_ids = await self.prepare(request.prompt)
            sampling = self.sampling(request, len(token_ids))
            echo = PromptEcho(self.tokenizer, request.prompt, token_ids) if request.echo else None
            track = self._track(sampling, token_ids, echo)
            stream = TextStream(self.tokenizer.detokenizer(), request.stop, sampling, len(token_ids), track)
            with self.activity.follow(self.submit(request, token_ids, sampling)) as generation:
                async for token_event in generation:
                    event = stream.feed(token_event)
                    if event is None:
                        continue
                    if echo is not None:
                        event, echo = echo.before(event), None
                    if event.finish_reason is not None:
                        generation.cancel()  # now, not when the reader comes back: a stop string may have ended it
                        if is_counted:
                            self.activity.count_answer(event.prompt_tokens, event.completion_tokens)
                        yield event
                        return
                    yield event
                raise AssertionError("the engine's events ended without a finish reason")

    def submit(self, request: TextRequest, token_ids: list[int], sampling: SamplingParams) -> GenerationStream:
        """The tokens of `request` as the engine makes them; its stop strings are not looked for."""
        try:
            return self.engine.submit(
                GenerateRequest(
                    request_id=request.request_id,
                    prompt_token_ids=token_ids,
                    sampling=self._with_tokenizer_eos(sampling),
                    priority=request.priority,
                    tenant=request.tenant,
                    cache_salt=request.cache_salt,
                    timeout_s=request.timeout_s,
                    queue_timeout_s=request.queue_timeout_s,
                    adapter=request.adapter,
                )
            )
        except SluiceError as error:
            if error.param == "prompt" and isinstance(_source(request.prompt), tuple):
                error.param = "messages"
            raise

    def sampling(self, request: TextRequest, prompt_tokens: int) -> SamplingParams:
        """How the tokens of `request` are chosen: what it says, over the model's defaults."""
        max_tokens = request.sampling.max_tokens
        if max_tokens is None:
            max_tokens = self._most_tokens_after(prompt_tokens)
        sampling = self.defaults.resolve(wanted_of_runtime(request.sampling, self.info.sampling_fields), max_tokens)
        if request.bad_words:
            sampling = msgspec.structs.replace(sampling, bad_words=bad_word_ids(self.tokenizer, request.bad_words))
        if request.biased_words:
            biases = with_biased_words(self.tokenizer, request.biased_words, sampling.logit_bias)
            sampling = msgspec.structs.replace(sampling, logit_bias=biases)
        return sampling

    def _track(self, sampling: SamplingParams, token_ids: list[int], echo: PromptEcho | None) -> LogprobTrack | None:
        has_output = sampling.logprobs is not None
        if not has_output and sampling.prompt_logprobs is None:
            return None
        texts = self.tokenizer.token_texts
        if echo is None:
            return LogprobTrack(texts, token_ids, has_output=has_output)
        starts, length = echo.starts(), len(echo.text)
        return LogprobTrack(texts, token_ids, has_output=has_output, echo_starts=starts, echo_length=length)

    def _most_tokens_after(self, prompt_tokens: int) -> int:
        """What context and KV cache leave; at least 1, so that a prompt that fills them is refused as too long."""
        info = self.info
        # The last token is never fed back, so it needs no slot.
        most_in_cache = info.num_blocks * info.block_size + 1
        return max(1, min(info.max_model_len, most_in_cache) - prompt_tokens)

    def _with_tokenizer_eos(self, sampling: SamplingParams) -> SamplingParams:
        """Chat models often end turns with a token that only their tokenizer calls the end of sequence."""
        eos = self.tokenizer.eos_token_id
        if eos is None or sampling.ignore_eos or eos in self.info.eos_token_ids:
            return sampling
        return msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, eos))


def _source(prompt: Prompt) -> PlainPrompt:
    """The prompt as the client sent it."""
    return prompt.source if isinstance(prompt, EncodedPrompt) else prompt
