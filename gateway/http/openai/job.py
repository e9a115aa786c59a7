"""What both generating routes make of their requests."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from engine.types import Grammar
from gateway.http.openai.beams import beam_width_of, check_beams
from gateway.http.openai.constraints import constraint_of
from gateway.http.openai.reply import Reply, ReplyOptions
from gateway.http.openai.retrieval import retrieval_param_names, retrieval_parameters
from gateway.http.openai.schemas import MAX_SEQUENCES, GenerationRequest
from gateway.http.scheduling import Scheduling
from pipelines.text.types import PlainPrompt, Prompt, SamplingOverrides, TextRequest
from sluice.errors import SluiceError, invalid

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.text.model import TextModel

MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts to continue under the same `fields`, and the shape of the answer.

    Each prompt is continued `best_of` times. `param_names` are the client's names of the fields that the
    engine names in its errors.
    """

    fields: GenerationRequest
    prompts: Sequence[PlainPrompt]
    sampling: SamplingOverrides
    reply: type[Reply]
    options: ReplyOptions
    best_of: int
    echo: bool
    param_names: Mapping[str, str]

    def text_requests(
        self, request_id: str, scheduling: Scheduling, prompts: Sequence[Prompt], collection_key: str = ""
    ) -> list[TextRequest]:
        """One request to the model for each sequence, those of one prompt together; `prompts` may be encoded.

        `collection_key` is what opens the collection that a pipeline looks into.
        """
        fields = self.fields
        common = TextRequest(
            request_id=request_id,
            prompt="",
            stop=_strings(fields.stop),
            bad_words=tuple(fields.bad_words or ()),
            echo=self.echo,
            cache_salt=fields.cache_salt or "",
            parameters=retrieval_parameters(fields.rag, collection_key),
            **scheduling.fields(fields.priority),
        )
        samplings = [self._sampling(index) for index in range(self.best_of)]
        return [
            msgspec.structs.replace(common, prompt=prompt, sampling=sampling)
            for prompt in prompts
            for sampling in samplings
        ]

    def check_model(self, model: "TextModel") -> None:
        """Raises INVALID for what `model` cannot do."""
        check_beams(self.fields, model.max_beam_width)

    def name_in_client_s_words(self, error: SluiceError) -> None:
        """Make `error` name the field that the client sent."""
        if error.param is not None:
            error.param = self.param_names.get(error.param, error.param)

    def _sampling(self, index: int) -> SamplingOverrides:
        """Of the sequence with this number of its prompt: each has a seed of its own."""
        seed = self.sampling.seed
        if seed is None or index == 0:
            return self.sampling
        return msgspec.structs.replace(self.sampling, seed=(seed + index) & MAX_SEED)


def job_of(
    fields: GenerationRequest,
    prompts: Sequence[PlainPrompt],
    reply: type[Reply],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None = None,
    echo: bool = False,
    param_names: Mapping[str, str] | None = None,
) -> Job:
    """What the route's own fields and the shared ones say together. Raises INVALID where they contradict each other.

    `logprobs` is how many alternatives to tell; None for no log probabilities.
    """
    n = fields.n or 1
    best_of = best_of or n
    _check(fields, len(prompts), best_of)
    constraint = constraint_of(fields)
    grammar = None if constraint is None else constraint[1]
    grammar_name = {} if constraint is None else {"grammar": constraint[0]}
    ranks = logprobs is None and best_of > n
    wanted = 0 if ranks else logprobs  # the likeliest are found by them
    logprobs_name = {"logprobs": "best_of"} if ranks else {}
    of_prompt = _most(fields.prompt_logprobs, logprobs if echo else None)
    return Job(
        fields=fields,
        prompts=prompts,
        sampling=_sampling(fields, max_tokens, wanted, of_prompt, grammar),
        reply=reply,
        options=ReplyOptions(len(prompts), n, _includes_usage(fields), logprobs, fields.prompt_logprobs),
        best_of=best_of,
        echo=echo,
        param_names={**retrieval_param_names(fields), **(param_names or {}), **logprobs_name, **grammar_name},
    )


def _check(fields: GenerationRequest, num_prompts: int, best_of: int) -> None:
    if best_of * num_prompts > MAX_SEQUENCES:
        name = "best_of" if best_of > (fields.n or 1) else "n"
        most = f"at most {MAX_SEQUENCES} sequences may be generated for one request"
        raise invalid(name, f"{name} is {best_of} and there are {num_prompts} prompts; {most}")
    if fields.stream and fields.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed; leave it out or send stream false")


def _sampling(
    fields: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingOverrides:
    """The sampling fields that the client sent."""
    ids = fields.stop_token_ids
    return SamplingOverrides(
        max_tokens=max_tokens,
        min_tokens=fields.min_tokens,
        temperature=fields.temperature,
        top_k=0 if fields.top_k == -1 else fields.top_k,
        top_p=fields.top_p,
        min_p=fields.min_p,
        typical_p=fields.typical_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        seed=fields.seed,
        stop_token_ids=None if ids is None else tuple(ids),
        ignore_eos=fields.ignore_eos,
        logit_bias=_logit_bias(fields.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        grammar=grammar,
        beam_width=beam_width_of(fields),
        length_penalty=fields.length_penalty,
        early_stopping=None if fields.early_stopping is None else int(fields.early_stopping),
        beam_search_diversity_rate=fields.beam_search_diversity_rate,
        no_repeat_ngram_size=fields.no_repeat_ngram_size,
        top_p_min=fields.top_p_min,
        top_p_decay=fields.top_p_decay,
        top_p_reset_ids=fields.top_p_reset_ids,
    )


def _logit_bias(sent: dict[str, float] | None) -> dict[int, float] | None:
    """By token id: JSON has no keys but strings."""
    if sent is None:
        return None
    for key in sent:
        if not re.fullmatch(r"\d{1,10}", key, re.ASCII):
            raise invalid("logit_bias", f"the keys of logit_bias must be token ids, got {key[:40]!r}")
    return {int(key): bias for key, bias in sent.items()}


def _includes_usage(fields: GenerationRequest) -> bool:
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
