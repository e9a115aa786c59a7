"""The language model that reads a prompt: its context and its tokens."""

import asyncio
from pathlib import Path

from sluice.errors import ErrorCode, SluiceError, invalid, named
from sluice.pipelines.llm.model import llm_text_of
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.rag.prompts.assembly import TokenBudget
from sluice.pipelines.rag.prompts.tokens import EstimatedTokens, PromptTokens, TokenizerTokens
from sluice.pipelines.rag.rag_prompt.request import PromptSettings
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.serving.backend import ModelLookup
from sluice.serving.model import Model


def read_prompt_tokens(settings: PromptSettings, folder: Path) -> PromptTokens | None:
    """Read the tokenizer of the settings, if any, relative to `folder`, on a thread. Raises UNAVAILABLE if it cannot be
    read."""
    return TokenizerTokens(Tokenizer.load(folder / settings.tokenizer)) if settings.tokenizer else None


class LanguageModel:
    """Looks the model up for each prompt, so that a reload takes effect. The settings describe a hosted model."""

    def __init__(self, models: ModelLookup, settings: PromptSettings, tokens: PromptTokens | None) -> None:
        """`tokens`, if given, counts in place of the model's own tokenizer."""
        self._models = models
        self._settings = settings
        self._tokens = tokens
        self._latest: tuple[Tokenizer, PromptTokens] | None = None
        """The tokenizer that the model had last, and the counter made of it."""

    @classmethod
    async def load(cls, models: ModelLookup, settings: PromptSettings, folder: Path) -> "LanguageModel":
        """Load the tokenizer of the settings, if any. Raises as `read_prompt_tokens`."""
        return cls(models, settings, await asyncio.to_thread(read_prompt_tokens, settings, folder))

    def budget(self, max_tokens: int | None) -> tuple[PromptTokens, TokenBudget]:
        """Return the model's token counter, and the budget of a prompt whose answer has `max_tokens` (None: default).

        Raises SluiceError UNAVAILABLE, which names the model, if it does not serve, INVALID for too long an answer.
        """
        model = self._find()
        text, max_context = llm_text_of(model), self._max_context(model)
        default = min(self._settings.max_tokens, max_context // 2)
        for_answer = default if max_tokens is None else max_tokens
        if for_answer >= max_context:
            longest = f"must be below the {max_context} tokens of model '{self._settings.llm}', got {for_answer}"
            raise invalid("max_tokens", f"parameter '{named('max_tokens')}' {longest}")
        return self._counter(text), TokenBudget(self._settings.llm, max_context, for_answer)

    @property
    def can_be_guided(self) -> bool:
        """Whether guided decoding can restrict the model's answer."""
        return llm_text_of(self._find()) is not None

    def _find(self) -> Model:
        try:
            return self._models.find(self._settings.llm)
        except SluiceError as error:
            message = f"its language model '{self._settings.llm}' (parameter llm) does not serve: {error.message}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error

    def _max_context(self, model: Model) -> int:
        text, configured = llm_text_of(model), self._settings.max_context_tokens
        if text is None:
            configured = configured or _configured_context(model)
            if not configured:
                message = f"model '{self._settings.llm}' does not tell its context: set its parameter context_tokens"
                raise SluiceError(ErrorCode.UNAVAILABLE, message)
            return configured
        info = text.info
        # The last token is never fed back, so it needs no slot.
        capacity = min(info.max_model_len, info.num_blocks * info.block_size + 1)
        return min(capacity, configured) if configured else capacity

    def _counter(self, text: LlmText | None) -> PromptTokens:
        if self._tokens is not None:
            return self._tokens
        if text is None:
            return EstimatedTokens(self._settings.chars_per_token)
        if self._latest is None or self._latest[0] is not text.tokenizer:
            self._latest = text.tokenizer, TokenizerTokens(text.tokenizer)
        return self._latest[1]


def _configured_context(model: Model) -> int:
    """Return the context that a hosted model's configuration declares, 0 if none."""
    text = model.config.parameters["context_tokens"].string_value if "context_tokens" in model.config.parameters else ""
    return int(text) if text.isascii() and text.isdigit() else 0
