"""An LLM engine as a model: text or token ids in, text out."""

from collections.abc import AsyncGenerator
from pathlib import Path

import msgspec

from engine.client import EngineClient
from engine.errors import SluiceError
from engine.stream import GenerationStream
from engine.types import EngineInfo, GenerateRequest, SamplingParams
from pipelines.text.defaults import SamplingDefaults, load_sampling_defaults
from pipelines.text.stream import TextStream
from pipelines.text.tokenizer import Tokenizer
from pipelines.text.types import Prompt, SamplingOverrides, TextEvent, TextRequest


class LlmModel:
    """A checkpoint's text side over the engine that runs it. Used from the engine client's event loop."""

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

    @classmethod
    def load(cls, name: str, path: Path, engine: EngineClient) -> "LlmModel":
        """Read the checkpoint's text side; takes most of a second. `engine` need not have started yet.

        Raises SluiceError UNAVAILABLE where `path` lacks what is needed or holds what cannot be read.
        """
        tokenizer, defaults = Tokenizer.load(path), load_sampling_defaults(path)
        return cls(name, tokenizer, engine, defaults, created=int((path / "config.json").stat().st_mtime))

    @property
    def info(self) -> EngineInfo:
        """The loaded engine. Raises SluiceError UNAVAILABLE before it has started."""
        return self.engine.info

    @property
    def max_model_len(self) -> int:
        """Longest prompt + output, in tokens."""
        return self.info.max_model_len

    async def prepare(self, prompt: Prompt) -> list[int]:
        """The prompt's token ids. Raises SluiceError INVALID; the engine checks length and range of ids."""
        if isinstance(prompt, str):
            return await self.tokenizer.encode_text(prompt)
        if isinstance(prompt, tuple):
            return await self.tokenizer.encode_chat(prompt)
        return prompt

    async def generate(self, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Generate; the last event has the finish reason. Closing the generator cancels.

        Raises SluiceError at the first event where the request is refused, at a later one where it failed.
        """
        token_ids = await self.prepare(request.prompt)
        sampling = self._sampling(request.sampling, len(token_ids))
        stream = TextStream(self.tokenizer.detokenizer(), request.stop, sampling, len(token_ids))
        generation = self._submit(request, token_ids, sampling)
        try:
            async for token_event in generation:
                event = stream.feed(token_event)
                if event is None:
                    continue
                if event.finish_reason is not None:
                    generation.cancel()  # now, not when the reader comes back: a stop string may have ended it
                    yield event
                    return
                yield event
            raise AssertionError("the engine's events ended without a finish reason")
        finally:
            generation.cancel()

    def _submit(self, request: TextRequest, token_ids: list[int], sampling: SamplingParams) -> GenerationStream:
        sampling = self._with_tokenizer_eos(sampling)
        try:
            return self.engine.submit(
                GenerateRequest(request_id=request.request_id, prompt_token_ids=token_ids, sampling=sampling)
            )
        except SluiceError as error:
            if error.param == "prompt" and isinstance(request.prompt, tuple):
                error.param = "messages"
            raise

    def _sampling(self, sent: SamplingOverrides, prompt_tokens: int) -> SamplingParams:
        max_tokens = sent.max_tokens
        if max_tokens is None:
            max_tokens = self._most_tokens_after(prompt_tokens)
        return self.defaults.resolve(sent, max_tokens)

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
