"""`POST /v1/completions`: its prompts and the shape of its answers."""

from collections.abc import Sequence
from typing import cast

from gateway.http.openai.beams import wants_beams
from gateway.http.openai.job import Job, job_of
from gateway.http.openai.logprobs import completion_logprobs, prompt_logprobs
from gateway.http.openai.reply import Choice, JsonObject, Reply, ending
from gateway.http.openai.schemas import CompletionRequest
from pipelines.text.types import PlainPrompt, TextEvent, TextLogprob
from sluice.errors import invalid

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completion_job(request: CompletionRequest) -> Job:
    """`n` choices for each prompt. Raises INVALID for fields that contradict each other."""
    return job_of(
        request,
        _prompts(request),
        CompletionReply,
        max_tokens=DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens,
        logprobs=request.logprobs,
        best_of=_best_of(request),
        echo=bool(request.echo),
        param_names={"query": "prompt"},
    )


def _best_of(request: CompletionRequest) -> int:
    """How many sequences are generated for each prompt; of a beam search one, whatever its beams."""
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


class CompletionReply(Reply):
    """Answers with plain texts."""

    protocol = "openai_completions"
    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def piece(self, index: int, text: str, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": None}

    def last_piece(self, index: int, end: TextEvent, logprobs: JsonObject | None) -> JsonObject:
        return {"index": index, "text": "", "logprobs": logprobs, **ending(end)}

    def choice(self, index: int, choice: Choice, logprobs: JsonObject | None) -> JsonObject:
        shown = {"index": index, "text": choice.text, "logprobs": logprobs, **ending(choice.end)}
        num_top = self._options.prompt_logprobs
        if num_top is None or choice.prompt_logprobs is None:
            return shown
        return {**shown, "prompt_logprobs": prompt_logprobs(choice.prompt_logprobs, num_top)}

    def logprobs(self, entries: Sequence[TextLogprob], num_top: int) -> JsonObject:
        return completion_logprobs(entries, num_top)
