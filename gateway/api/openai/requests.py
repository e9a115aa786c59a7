"""From a generation request's fields to text requests: sampling, beams, retrieval, templates."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from sluice.engine.sampling_fields import MAX_SEED, SAMPLING_FIELDS
from sluice.engine.types import Grammar
from sluice.errors import SluiceError, invalid
from sluice.gateway.api.openai.constraints import CONSTRAINT_FIELDS, parse_constraint
from sluice.gateway.api.openai.reply import ReplyOptions
from sluice.gateway.api.openai.schemas import (
    MAX_SEQUENCES,
    GenerationRequest,
    RetrievalFields,
    StreamOptions,
    TemplateFields,
)
from sluice.gateway.api.sampling import CONVERSIONS
from sluice.gateway.api.tools import THINKING_SWITCHES
from sluice.gateway.front.http.errors import client_names
from sluice.gateway.front.http.parsing import RequestObject, relaxed_parts, retriever_parameters
from sluice.pipelines.llm.text_models import SEPARATOR
from sluice.pipelines.rag.filters import parse_filter
from sluice.pipelines.text.chat_template import names_in_template
from sluice.pipelines.text.model import TextModel
from sluice.pipelines.text.sampling import drop_random_seed
from sluice.pipelines.text.types import (
    OWNER_KEY,
    Conversation,
    PlainPrompt,
    Prompt,
    PromptForm,
    SamplingOverrides,
    TemplateOptions,
    TextForm,
    TextRequest,
)

_NO_BEAMS = "the most that this server decodes with is a beam width of 1; ask for several answers with n"
_RETRIEVAL_NAMES = {"parameters": "rag", **{name: f"rag.{name}" for name in ("collection", "filter", "mode")}}
_TIER_PRIORITIES = {"priority": -1, "flex": 1}
"""Priorities of the service tiers besides the default one's 0. Lower runs earlier."""
_TEMPLATE_FIELDS = ("verbosity",)
"""Fields that are arguments of a chat template."""


def parse_generation(
    fields: GenerationRequest,
    base: TextRequest,
    prompts: Sequence[PlainPrompt],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    best_of: int | None = None,
    echo: bool = False,
    param_names: Mapping[str, str] | None = None,
) -> tuple[list[TextRequest], ReplyOptions]:
    """Return a request for each sequence, those of one prompt side by side, and what the client wants in the answer.

    `base` has what every route reads alike: id, protocol and scheduling. `logprobs` is the number of alternatives to
    return; None for no log probabilities. Raises INVALID for fields that contradict each other.
    """
    n = fields.n or 1
    best_of = best_of or n
    _check(fields, len(prompts), best_of)
    constraint = None if CONSTRAINT_FIELDS.isdisjoint(fields.model_fields_set) else parse_constraint(fields)
    grammar = constraint[1] if constraint is not None and isinstance(constraint[1], Grammar) else None
    tag = constraint[1] if constraint is not None and isinstance(constraint[1], str) else ""
    grammar_name = {} if constraint is None else {"grammar": constraint[0]}
    ranks = logprobs is None and best_of > n
    sampled_logprobs = 0 if ranks else logprobs  # they rank the sequences
    logprobs_name = {"logprobs": "best_of"} if ranks else {}
    num_prompt_logprobs = _highest(fields.prompt_logprobs, logprobs if echo else None)
    sampling = _sampling(fields, max_tokens, sampled_logprobs, num_prompt_logprobs, grammar)
    common = msgspec.structs.replace(
        base,
        stop=_strings(fields.stop),
        bad_words=tuple(fields.bad_words or ()),
        echo=echo,
        structural_tag=tag,
        form=_form(fields),
        prompt_form=_prompt_form(fields, max_tokens),
        cache_salt=fields.cache_salt or "",
        parameters=_retrieval_parameters(fields.rag),
    )
    requests = [
        msgspec.structs.replace(common, prompt=prompt, sampling=_sequence_sampling(sampling, index))
        for prompt in prompts
        for index in range(best_of)
    ]
    options = ReplyOptions(
        num_prompts=len(prompts),
        n=n,
        best_of=best_of,
        **_usage_options(fields.stream_options),
        service_tier={"auto": "default"}.get(fields.service_tier or "", fields.service_tier),
        top_logprobs=logprobs,
        prompt_logprobs=fields.prompt_logprobs,
        returns_token_ids=bool(fields.return_token_ids),
        names_tokens_by_id=bool(fields.return_tokens_as_token_ids),
        param_names={**_retrieval_param_names(fields), **(param_names or {}), **logprobs_name, **grammar_name},
        relaxed=() if grammar is None else relaxed_parts(grammar),
    )
    return requests, options


def requested_priority(fields: GenerationRequest) -> int | None:
    """Return the priority that the body asks for, by its number or by its service tier."""
    return _TIER_PRIORITIES.get(fields.service_tier or "") if fields.priority is None else fields.priority


def model_name(fields: GenerationRequest) -> str:
    """Return the model's name with its LoRA adapter, whichever of the two fields names that."""
    name = fields.model
    if fields.lora_request is None or name.endswith(SEPARATOR + fields.lora_request.lora_name):
        return name
    return name + SEPARATOR + fields.lora_request.lora_name


def with_owner_key(request: TextRequest, key: str) -> TextRequest:
    """Return `request` with the key that opens the collection it may look into."""
    return msgspec.structs.replace(request, parameters={**request.parameters, OWNER_KEY: key})


def template_arguments(fields: GenerationRequest) -> dict[str, Any]:
    """Return the fields that become variables of the chat template."""
    sent = {name: value for name in _TEMPLATE_FIELDS if (value := getattr(fields, name, None)) is not None}
    return sent | effort_arguments(getattr(fields, "reasoning_effort", None))


def effort_arguments(effort: str | None) -> dict[str, Any]:
    """Return the variables by which chat templates take how long the model thinks, or whether it does."""
    if effort is None:
        return {}
    return ({} if effort == "none" else {"reasoning_effort": effort}) | dict.fromkeys(
        THINKING_SWITCHES, effort != "none"
    )


def parse_template_options(fields: TemplateFields, arguments: Mapping[str, Any], **more: Any) -> TemplateOptions:
    """Return how a conversation is rendered. `arguments` are fields that become variables of the template, and win over
    `chat_template_kwargs`; `more` are further options. Raises INVALID for fields that contradict each other."""
    continues = bool(fields.continue_final_message)
    if continues and fields.add_generation_prompt:
        raise invalid(
            "continue_final_message",
            "continue_final_message and add_generation_prompt are both true: the answer either goes on with the last "
            "message or is a new one",
        )
    adds = not continues if fields.add_generation_prompt is None else fields.add_generation_prompt
    return TemplateOptions(
        documents=tuple(fields.documents or ()),
        template=fields.chat_template,
        arguments={**(fields.chat_template_kwargs or {}), **arguments},
        adds_generation_prompt=adds,
        continues_final_message=continues,
        **more,
    )


def check_trust(fields: RequestObject, *, trusts_templates: bool) -> None:
    """Raise INVALID for a request with a template of its own, unless the server trusts those."""
    if isinstance(fields, TemplateFields) and fields.chat_template is not None and not trusts_templates:
        message = "chat_template is not allowed in requests to this server (--trust-request-chat-template)"
        raise invalid("chat_template", f"{message}; leave it out")


def without_effect(fields: GenerationRequest, prompt: Prompt, model: TextModel) -> list[str]:
    """Return the paths of the fields that change nothing with this model."""
    names = ["store"] if fields.store else []
    if isinstance(prompt, Conversation) and prompt.options.arguments:
        template, effort = prompt.options.template, effort_arguments(getattr(fields, "reasoning_effort", None))
        known = model.template_names if template is None else names_in_template(template)
        if effort and known.isdisjoint(effort):
            names.append("reasoning_effort")
        unknown = sorted(prompt.options.arguments.keys() - known - effort.keys())
        names += [name if name in _TEMPLATE_FIELDS else f"chat_template_kwargs.{name}" for name in unknown]
    return names


def _usage_options(sent: StreamOptions | None) -> dict[str, bool]:
    """Return whether a stream ends with the counts of its tokens, and whether each of its chunks has them."""
    includes = sent is not None and bool(sent.include_usage)
    return {
        "include_usage": includes,
        "continuous_usage": includes and sent is not None and bool(sent.continuous_usage_stats),
    }


def _sequence_sampling(sampling: SamplingOverrides, index: int) -> SamplingOverrides:
    """Return the sampling of a prompt's sequence number `index`: each sequence has a seed of its own."""
    if "seed" not in sampling or index == 0:
        return sampling
    return {**sampling, "seed": (sampling["seed"] + index) & MAX_SEED}


def _check(fields: GenerationRequest, num_prompts: int, best_of: int) -> None:
    if best_of * num_prompts > MAX_SEQUENCES:
        name = "best_of" if best_of > (fields.n or 1) else "n"
        most = f"at most {MAX_SEQUENCES} sequences may be generated for one request"
        raise invalid(name, f"{name} is {best_of} and there are {num_prompts} prompts; {most}")


def _form(fields: GenerationRequest) -> TextForm:
    sent = {name: getattr(fields, name) for name in TextForm.__struct_fields__}
    return TextForm(**{name: value for name, value in sent.items() if value is not None})


def _prompt_form(fields: GenerationRequest, max_tokens: int | None) -> PromptForm:
    if fields.truncate_prompt_tokens == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0")
    return PromptForm(
        suffix=getattr(fields, "suffix", None) or "",
        add_special_tokens=fields.add_special_tokens,
        truncate_prompt_tokens=fields.truncate_prompt_tokens,
        num_reserved=max_tokens or 1,
    )


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
    sampling = drop_random_seed({name: value for name, value in sampling.items() if value is not None})
    for name, convert in CONVERSIONS.items():
        if name in sampling:
            sampling[name] = convert(sampling[name])
    return sampling


def wants_beams(fields: GenerationRequest) -> bool:
    return bool(fields.use_beam_search) or fields.beam_width not in (None, 1)


def _parse_beam_width(fields: GenerationRequest) -> int | None:
    """Return the number of beams, from `beam_width`, `best_of` or `n`; None without a beam search."""
    if not wants_beams(fields):
        return None
    return fields.beam_width or fields.best_of or fields.n or 1


def check_beams(fields: GenerationRequest, max_beam_width: int) -> None:
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


def _retrieval_parameters(sent: RetrievalFields | None) -> dict[str, str | int | float | bool]:
    """Return the request parameters of a retrieving step. Raises INVALID for a filter that cannot be read."""
    if sent is None:
        return {}
    with client_names({"filter": "rag.filter"}):
        parse_filter(sent.filter)
    return retriever_parameters(sent.collection, sent.top_k, sent.mode, sent.filter)
