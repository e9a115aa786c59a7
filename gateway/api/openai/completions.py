"""`POST /v1/completions`: its prompts, and the shape of its answers."""

from collections.abc import Mapping, Sequence
from typing import ClassVar, cast

import msgspec

from sluice.errors import invalid
from sluice.gateway.api.openai.reply import Choice, JsonObject, OpenAIReply, completion_logprobs, ending_fields
from sluice.gateway.api.openai.requests import OpenAITranslator
from sluice.gateway.api.openai.schemas import CompletionRequest
from sluice.pipelines.text.types import PlainPrompt, TextDetail, TextEvent, TextLogprob, TextRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


class CompletionReply(OpenAIReply):
    """Formats answers as plain texts."""

    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def piece(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def last_piece(self, index: int, end: TextEvent, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "text": "", "logprobs": logprobs, **ending_fields(end)}

    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        fields = {"index": index, "text": choice.text, "logprobs": logprobs, **ending_fields(choice.end)}
        return {**fields, **self.token_fields(choice.token_ids), **self.prompt_fields(choice.details)}

    def piece_fields(self, detail: TextDetail) -> JsonObject:
        return self.prompt_fields([detail])

    def logprobs(self, entries: Sequence[TextLogprob], num_top: int) -> JsonObject:
        return completion_logprobs(entries, num_top)


class CompletionTranslator(OpenAITranslator[CompletionRequest]):
    """Prompts to continue."""

    protocol = "openai_completions"
    names: ClassVar[Mapping[str, str]] = {"query": "prompt"}
    reply_type = CompletionReply

    def parse(self, base: TextRequest) -> list[TextRequest]:
        fields, prompt = self.fields, self.fields.prompt
        is_single = isinstance(prompt, str) or isinstance(prompt[0], int)
        if fields.suffix and fields.echo:
            message = "suffix must be left out with echo: the text is what stands between prompt and suffix"
            raise invalid("suffix", message)
        if fields.suffix and not isinstance(prompt, str) and not isinstance(prompt[0], str):
            raise invalid("suffix", "suffix needs a prompt of text, got token ids")
        if fields.max_tokens == 0 and not fields.echo:  # else it asks for the prompt's own log probabilities
            raise invalid("max_tokens", "max_tokens must be greater than or equal to 1 without echo, got 0")
        base = msgspec.structs.replace(base, default_max_tokens=DEFAULT_MAX_TOKENS, echo=bool(fields.echo))
        prompts = cast(list[PlainPrompt], [prompt] if is_single else prompt)
        return self.parse_generation(base, prompts, fields.max_tokens, fields.logprobs, self._best_of())

    def _best_of(self) -> int:
        """Return how many sequences each prompt gets; one in a beam search, whatever its beams."""
        fields, n, best_of = self.fields, self.fields.n or 1, self.fields.best_of
        if best_of is None or self.wants_beams:
            return n
        if best_of < n:
            raise invalid("best_of", f"best_of must be at least n ({n}), got {best_of}")
        if fields.stream and best_of != n:
            reason = "which of them are the likeliest is known only at the end"
            raise invalid("best_of", f"best_of must equal n ({n}) in a stream, got {best_of}: {reason}")
        return best_of
