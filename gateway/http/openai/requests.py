"""From a generation request's fields to what both generating routes do: sampling, constraints, beams, retrieval."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from engine.sampling_fields import MAX_SEED, SAMPLING_FIELDS
from engine.types import Grammar, GrammarKind
from gateway.http.openai.reply import OpenAIReply, ReplyOptions
from gateway.http.openai.schemas import (
    MAX_SEQUENCES,
    GenerationRequest,
    ResponseFormat,
    RetrievalFields,
    StructuredOutputs,
)
from gateway.http.parsing import retriever_parameters
from gateway.http.request import Scheduling
from pipelines.rag.filters import parse_filter
from pipelines.text.types import PlainPrompt, Prompt, SamplingOverrides, TextRequest
from sluice.errors import SluiceError, invalid

if TYPE_CHECKING:  # heavy to import, and the server listens before it is
    from pipelines.text.model import TextModel

_NO_BEAMS = "the most that this server decodes with is a beam width of 1; ask for several answers with n"
_RETRIEVAL_NAMES = {"parameters": "rag", **{name: f"rag.{name}" for name in ("collection", "filter", "mode")}}
Constraint = tuple[str, Grammar]
"""Path of the client's field, and the grammar in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Prompts to continue under the same `fields`, and the shape of the answer.

    Each prompt is continued `best_of` times. `param_names` maps the names that the engine uses in its errors to the
    client's names.
    """

    fields: GenerationRequest
    prompts: Sequence[PlainPrompt]
    sampling: SamplingOverrides
    reply: type[OpenAIReply]
    options: ReplyOptions
    best_of: int
    echo: bool
    param_names: Mapping[str, str]

    def text_requests(
        self, request_id: str, scheduling: Scheduling, prompts: Sequence[Prompt], collection_key: str = ""
    ) -> list[TextRequest]:
        """Make a request for each sequence, those of one prompt side by side. `prompts` may be encoded.

        `collection_key` opens the collection that a pipeline looks into.
        """
        fields = self.fields
        common = TextRequest(
            request_id=request_id,
            prompt="",
            stop=_strings(fields.stop),
            bad_words=tuple(fields.bad_words or ()),
            echo=self.echo,
            cache_salt=fields.cache_salt or "",
            parameters=_retrieval_parameters(fields.rag, collection_key),
            **scheduling.fields(fields.priority),
        )
        samplings = [self._sampling(index) for index in range(self.best_of)]
        return [
            msgspec.structs.replace(common, prompt=prompt, sampling=sampling)
            for prompt in prompts
            for sampling in samplings
        ]

    def check_model(self, model: "TextModel") -> None:
        """Raise INVALID for a request that `model` cannot serve."""
        _check_beams(self.fields, model.max_beam_width)

    def use_client_names(self, error: SluiceError) -> None:
        """Make `error` name the field as the client does."""
        if error.param is not None:
            error.param = self.param_names.get(error.param, error.param)

    def _sampling(self, index: int) -> SamplingOverrides:
        """Return the sampling of a prompt's sequence number `index`: each sequence has a seed of its own."""
        if "seed" not in self.sampling or index == 0:
            return self.sampling
        return {**self.sampling, "seed": (self.sampling["seed"] + index) & MAX_SEED}


def parse_job(
    fields: GenerationRequest,
    prompts: Sequence[PlainPrompt],
    reply: type[OpenAIReply],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None = None,
    echo: bool = False,
    param_names: Mapping[str, str] | None = None,
) -> Job:
    """Combine the route's own fields with the shared ones. Raises INVALID where they contradict each other.

    `logprobs` is the number of alternatives to return; None for no log probabilities.
    """
    n = fields.n or 1
    best_of = best_of or n
    _check(fields, len(prompts), best_of)
    constraint = _parse_constraint(fields)
    grammar = None if constraint is None else constraint[1]
    grammar_name = {} if constraint is None else {"grammar": constraint[0]}
    ranks = logprobs is None and best_of > n
    sampled_logprobs = 0 if ranks else logprobs  # they rank the sequences
    logprobs_name = {"logprobs": "best_of"} if ranks else {}
    num_prompt_logprobs = _highest(fields.prompt_logprobs, logprobs if echo else None)
    return Job(
        fields=fields,
        prompts=prompts,
        sampling=_sampling(fields, max_tokens, sampled_logprobs, num_prompt_logprobs, grammar),
        reply=reply,
        options=ReplyOptions(len(prompts), n, _includes_usage(fields), logprobs, fields.prompt_logprobs),
        best_of=best_of,
        echo=echo,
        param_names={**_retrieval_param_names(fields), **(param_names or {}), **logprobs_name, **grammar_name},
    )


def _check(fields: GenerationRequest, num_prompts: int, best_of: int) -> None:
    if best_of * num_prompts > MAX_SEQUENCES:
        name = "best_of" if best_of > (fields.n or 1) else "n"
        most = f"at most {MAX_SEQUENCES} sequences may be generated for one request"
        raise invalid(name, f"{name} is {best_of} and there are {num_prompts} prompts; {most}")
    if fields.stream and fields.prompt_logprobs is not None:
        raise invalid("prompt_logprobs", "prompt_logprobs cannot be streamed; leave it out or send stream false")


def _includes_usage(fields: GenerationRequest) -> bool:
    return fields.stream_options is not None and bool(fields.stream_options.include_usage)


def _highest(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _sampling(
    fields: GenerationRequest,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    grammar: Grammar | None,
) -> SamplingOverrides:
    """Return the sampling fields that the client sent, by the engine's names and in its types."""
    sampling = {name: getattr(fields, name) for name, field in SAMPLING_FIELDS.items() if field.is_in_openai} | {
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
        "grammar": grammar,
        "beam_width": _parse_beam_width(fields),
    }
    sampling = {name: value for name, value in sampling.items() if value is not None}
    for name, convert in _CONVERSIONS.items():
        if name in sampling:
            sampling[name] = convert(sampling[name])
    return sampling


def _logit_bias(sent: dict[str, float]) -> dict[int, float]:
    """Key the biases by token id: JSON has no keys but strings."""
    for key in sent:
        if not re.fullmatch(r"\d{1,10}", key, re.ASCII):
            raise invalid("logit_bias", f"the keys of logit_bias must be token ids, got {key[:40]!r}")
    return {int(key): bias for key, bias in sent.items()}


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "top_k": lambda value: 0 if value == -1 else value,
    "early_stopping": int,
    "stop_token_ids": tuple,
    "logit_bias": _logit_bias,
}
"""Fields that the engine has in another type or with another value for off."""


def _parse_constraint(fields: GenerationRequest) -> Constraint | None:
    """Return the constraint on the answer; None where there is none. Raises INVALID for two of them."""
    found = list(_read_constraints(fields))
    if len(found) > 1:
        (first, _), (second, _) = found[:2]
        raise invalid(second, f"{second} and {first} both say what the answer must match; send one of them")
    return found[0] if found else None


def _read_constraints(fields: GenerationRequest) -> Iterator[Constraint]:
    if fields.response_format is not None:
        yield from _read_response_format(fields.response_format)
    yield from _read_guided(
        "guided_", fields.guided_json, fields.guided_regex, fields.guided_choice, fields.guided_grammar
    )
    if fields.structured_outputs is not None:
        yield from _read_structured_outputs(fields.structured_outputs)


def _read_response_format(sent: ResponseFormat) -> Iterator[Constraint]:
    if sent.type == "json_object":
        yield "response_format", Grammar(GrammarKind.JSON_OBJECT)
    if sent.type == "json_schema":
        path = "response_format.json_schema"
        if sent.json_schema is None:
            raise invalid(path, f"{path} is required where response_format.type is json_schema")
        if sent.json_schema.schema_ is None:
            raise invalid(f"{path}.schema", f"{path}.schema is required")
        yield f"{path}.schema", Grammar(GrammarKind.JSON_SCHEMA, _json_text(sent.json_schema.schema_))


def _read_structured_outputs(sent: StructuredOutputs) -> Iterator[Constraint]:
    yield from _read_guided("structured_outputs.", sent.json_, sent.regex, sent.choice, sent.grammar)
    if sent.json_object:
        yield "structured_outputs.json_object", Grammar(GrammarKind.JSON_OBJECT)


def _read_guided(
    prefix: str,
    json_schema: str | dict[str, Any] | None,
    regex: str | None,
    choice: list[str] | None,
    grammar: str | None,
) -> Iterator[Constraint]:
    """Read vLLM's four constraints, which it spells in two ways: with a prefix, and as fields of an object."""
    if json_schema is not None:
        yield f"{prefix}json", Grammar(GrammarKind.JSON_SCHEMA, _json_text(json_schema))
    if regex is not None:
        yield f"{prefix}regex", Grammar(GrammarKind.REGEX, regex)
    if choice is not None:
        yield f"{prefix}choice", Grammar(GrammarKind.CHOICE, _json_text(choice))
    if grammar is not None:
        yield f"{prefix}grammar", Grammar(GrammarKind.EBNF, grammar)


def _json_text(value: str | dict[str, Any] | list[str]) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def wants_beams(fields: GenerationRequest) -> bool:
    return bool(fields.use_beam_search) or fields.beam_width not in (None, 1)


def _parse_beam_width(fields: GenerationRequest) -> int | None:
    """Return the number of beams, from `beam_width`, `best_of` or `n`; None without a beam search."""
    if not wants_beams(fields):
        return None
    return fields.beam_width or fields.best_of or fields.n or 1


def _check_beams(fields: GenerationRequest, max_beam_width: int) -> None:
    """Raise INVALID for a beam search that a model with at most `max_beam_width` beams cannot do."""
    width = _parse_beam_width(fields)
    if width is None:
        return
    if max_beam_width == 1:
        raise _beams_refused(fields)
    if width < 2:
        raise invalid("use_beam_search", "use_beam_search needs best_of or beam_width, of at least 2: the beams")
    if width > max_beam_width:
        name = _beam_width_name(fields)
        raise invalid(name, f"{name} must be at most {max_beam_width}, the beams of this model, got {width}")
    if (fields.n or 1) > 1:
        reason = "the best beam is the answer; say how many there are with best_of or beam_width"
        raise invalid("n", f"n must be 1 with a beam search, got {fields.n}: {reason}")


def _beams_refused(fields: GenerationRequest) -> SluiceError:
    if fields.use_beam_search:
        return invalid("use_beam_search", f"use_beam_search must be false: {_NO_BEAMS}")
    return invalid("beam_width", f"beam_width must be 1, got {fields.beam_width}: {_NO_BEAMS}")


def _beam_width_name(fields: GenerationRequest) -> str:
    if fields.beam_width is not None:
        return "beam_width"
    return "best_of" if fields.best_of is not None else "n"


def _retrieval_param_names(fields: GenerationRequest) -> dict[str, str]:
    """Return the client's names of a retrieving step's parameters. A language model has a `top_k` as well."""
    is_retrieval = fields.rag is not None and fields.rag.top_k is not None and fields.top_k is None
    return {**_RETRIEVAL_NAMES, **({"top_k": "rag.top_k"} if is_retrieval else {})}


def _retrieval_parameters(sent: RetrievalFields | None, collection_key: str) -> dict[str, str | int | float | bool]:
    """Return the request parameters of a retrieving step. Raises INVALID for a filter that cannot be read."""
    if sent is None:
        return retriever_parameters(None, None, None, None, collection_key)
    _check_filter(sent.filter)
    return retriever_parameters(sent.collection, sent.top_k, sent.mode, sent.filter, collection_key)


def _check_filter(filter: dict[str, Any] | None) -> None:
    try:
        parse_filter(filter)
    except SluiceError as error:
        error.param = _RETRIEVAL_NAMES["filter"]
        raise
