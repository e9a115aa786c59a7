"""`POST /v1/completions`: its prompts, and the shape of its answers."""

from collections.abc import Sequence
from typing import cast

import msgspec

from sluice.errors import invalid
from sluice.gateway.api.openai.reply import (
    Choice,
    JsonObject,
    OpenAIReply,
    ReplyOptions,
    completion_logprobs,
    ending_fields,
)
from sluice.gateway.api.openai.requests import parse_generation, wants_beams
from sluice.gateway.api.openai.schemas import CompletionRequest
from sluice.pipelines.text.types import PlainPrompt, TextDetail, TextEvent, TextLogprob, TextRequest

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default."""


def parse_completion_request(request: CompletionRequest, base: TextRequest) -> tuple[list[TextRequest], ReplyOptions]:
    """Parse prompts to continue, with `n` choices each. Raises INVALID for fields that contradict each other."""
    _check_suffix(request)
    return parse_generation(
        request,
        msgspec.structs.replace(base, default_max_tokens=DEFAULT_MAX_TOKENS),
        _prompts(request),
        max_tokens=_max_tokens(request),
        logprobs=request.logprobs,
        best_of=_best_of(request),
        echo=bool(request.echo),
        param_names={"query": "prompt"},
    )


def _check_suffix(request: CompletionRequest) -> None:
    if request.suffix and request.echo:
        raise invalid("suffix", "suffix must be left out with echo: the text is what stands between prompt and suffix")
    if request.suffix and not isinstance(request.prompt, str) and not isinstance(request.prompt[0], str):
        raise invalid("suffix", "suffix needs a prompt of text, got token ids")


def _max_tokens(request: CompletionRequest) -> int | None:
    """Return the field; 0 asks for the prompt's own log probabilities."""
    if request.max_tokens == 0 and not request.echo:
        raise invalid("max_tokens", "max_tokens must be greater than or equal to 1 without echo, got 0")
    return request.max_tokens


def _best_of(request: CompletionRequest) -> int:
    """Return how many sequences each prompt gets; one in a beam search, whatever its beams."""
    n, best_of = request.n or 1, request.best_of
    if best_of is None or wants_beams(request):
        return n
    if best_of < n:
        raise invalid("best_of", f"best_of must be at least n ({n}), got {best_of}")
    if request.stream and best_of != n:
        reason = "which of them are the likeliest is known only at the end"
        raise invalid("best_of", f"best_of must equal n ({n}) in a stream, got {best_of}: {reason}")
    return best_of


def _prompts(request: CompletionRequest) -> list[PlainPrompt]:
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [cast(PlainPrompt, prompt)]
    return cast(list[PlainPrompt], prompt)


class CompletionReply(OpenAIReply):
    """Formats answers as plain texts."""

    protocol = "openai_completions"
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
