"""A text request's sampling fields as the request parameters that a language model behind tensors reads."""

import msgspec

from engine.types import Grammar, GrammarKind
from pipelines.text.runtime_fields import RUNTIME_FIELDS, wanted_of_runtime
from pipelines.text.types import TextRequest
from sluice.errors import SluiceError, invalid

Scalars = dict[str, str | int | float | bool]

_PLAIN = (
    *("max_tokens", "min_tokens", "temperature", "top_p", "min_p", "typical_p", "seed", "ignore_eos"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
_GUIDES = {
    GrammarKind.JSON_OBJECT: "json",
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "ebnf_grammar",
}
_NOT_PASSED_ON = ("logit_bias", "logprobs", "prompt_logprobs", *RUNTIME_FIELDS)
"""Fields that no input of a language model stands for, or which another one would leave unread without a word."""


def as_parameters(request: TextRequest, model: str) -> Scalars:
    """What the client sent, under the names of a language model's inputs (`pipelines/llm/fields.py`).

    Raises SluiceError INVALID, which names the field, for what would be lost on the way to the steps of `model`.
    """
    sampling = wanted_of_runtime(request.sampling, ())
    for name in _NOT_PASSED_ON:
        if getattr(sampling, name) is not None:
            raise _lost(name, model)
    if request.echo:
        raise _lost("echo", model)
    values = ((name, getattr(sampling, name)) for name in _PLAIN)
    parameters: Scalars = {name: value for name, value in values if value is not None}
    parameters |= _guide(sampling.grammar, model)
    config = _config(request)
    if config:
        parameters["sampling_config"] = msgspec.json.encode(config).decode()
    if request.cache_salt:
        parameters["cache_salt"] = request.cache_salt
    return parameters | {"return_num_input_tokens": True, "return_num_output_tokens": True}


def _config(request: TextRequest) -> dict[str, object]:
    """Lists, which are no parameters; and `top_k`, as a retrieving step has a parameter of that name too."""
    config = {
        "top_k": request.sampling.top_k,
        "stop_words": request.stop or None,
        "bad_words": request.bad_words or None,
        "stop_token_ids": request.sampling.stop_token_ids or None,
    }
    return {name: value for name, value in config.items() if value is not None}


def _guide(grammar: Grammar | None, model: str) -> Scalars:
    if grammar is None:
        return {}
    kind = _GUIDES.get(grammar.kind)
    if kind is None:
        raise _lost("grammar", model, f"; constraints that are: {', '.join(_GUIDES.values())}")
    guide: Scalars = {"guided_decoding_guide": grammar.text} if grammar.text else {}
    return {"guided_decoding_guide_type": kind} | guide


def _lost(name: str, model: str, more: str = "") -> SluiceError:
    return invalid(
        name, f"{name} is not passed on by model '{model}', whose language model is a step among others{more}"
    )
