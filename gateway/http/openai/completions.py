"""`POST /v1/completions`: its prompts and the shape of its answers."""

from typing import cast

from gateway.http.openai.job import Job
from gateway.http.openai.reply import Choice, JsonObject, Reply, ending
from gateway.http.openai.schemas import CompletionRequest
from pipelines.text.types import Prompt, TextEvent

DEFAULT_MAX_TOKENS = 16
"""OpenAI's."""


def completion_job(request: CompletionRequest) -> Job:
    """One choice for each prompt."""
    max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return Job(request, _prompts(request), max_tokens, CompletionReply)


def _prompts(request: CompletionRequest) -> list[Prompt]:
    prompt = request.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [cast(Prompt, prompt)]
    return cast(list[Prompt], prompt)


class CompletionReply(Reply):
    """Answers with plain texts."""

    protocol = "openai_completions"
    id_prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def piece(self, index: int, text: str) -> JsonObject:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": None}

    def last_piece(self, index: int, end: TextEvent) -> JsonObject:
        return {"index": index, "text": "", "logprobs": None, **ending(end)}

    def choice(self, index: int, choice: Choice) -> JsonObject:
        return {"index": index, "text": choice.text, "logprobs": None, **ending(choice.end)}
