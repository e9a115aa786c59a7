"""From our sampling parameters to vLLM's, field by field."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sluice.engine.delegated.vllm.library import VllmLibrary
from sluice.engine.guidance.translate import translate
from sluice.engine.types import GenerateRequest, Grammar, SamplingParams
from sluice.errors import invalid

_NESTED = "answer_of_client"
"""The rule that stands for the second grammar."""


def lark_of(grammar: Grammar) -> str:
    """Return a client's grammar as one of Lark, which vLLM's backend `guidance` hands to llguidance as it is: the one
    that our own executor gives to it, so that outputs are the same. Raises INVALID for what is wrong with the text."""
    first, *others = json.loads(translate(grammar).text)["grammars"]
    if not others:
        text: str | None = first.get("lark_grammar")
        return text if text is not None else f"start: {_directive(first)}\n"
    # What comes before the answer refers to it by its name as a grammar; here it is a rule.
    [answer] = others
    return f"{first['lark_grammar'].replace('@answer', _NESTED)}\n{_NESTED}: {_directive(answer)}\n"


def _directive(grammar: Mapping[str, Any]) -> str:
    if grammar.get("json_schema") is not None:
        return f"%json {json.dumps(grammar['json_schema'])}"
    return f"%lark {{\n{grammar['lark_grammar']}\n}}"


_MAX_SEED = (1 << 63) - 1
"""Seeds are signed there; larger ones lose their first bit."""
_UNSET = SamplingParams()

Value = Callable[[GenerateRequest], Any]
"""Returns a field's value; None leaves the field at its default."""


@dataclass(frozen=True, slots=True)
class VllmField:
    """One field of vLLM's SamplingParams: what it is made of, or why it is left alone."""

    name: str
    ours: str
    """Our field, "" for none."""
    note: str = ""
    value: Value | None = None
    """None: the field is never given."""


def sampling_params(library: VllmLibrary, request: GenerateRequest, *, has_tokenizer: bool) -> Any:
    """Return `vllm.SamplingParams` for a request; what was generated before (`resume_token_ids`) counts. Raises
    INVALID, naming the field, for what vLLM cannot do."""
    params = request.sampling
    if params.typical_p != 1.0:
        raise invalid("typical_p", f"typical_p must be 1, since vLLM has no such filter, got {params.typical_p}")
    if params.grammar is not None and not has_tokenizer:
        message = "this model has no tokenizer.json, without which vLLM keeps to no grammar; give --tokenizer"
        raise invalid("grammar", message)
    values = {field.name: field.value(request) for field in FIELDS if field.value is not None}
    given = {name: value for name, value in values.items() if value is not None}
    if (lark := given.pop("structured_outputs", None)) is not None:
        given["structured_outputs"] = library.find("vllm.sampling_params:StructuredOutputsParams")(grammar=lark)
    bad_words = given.pop("_bad_words_token_ids", None)
    given["output_kind"] = library.find("vllm.sampling_params:RequestOutputKind").DELTA
    made = library.find("vllm.sampling_params:SamplingParams")(**given)
    made._bad_words_token_ids = bad_words  # its own field for words takes text, of which it makes these
    return made


def needs_replay(request: GenerateRequest) -> bool:
    """Return whether an answer that goes on after a crash is generated anew: vLLM counts penalties and draws of a seed
    from the first token that it generates, and matches a grammar from there."""
    params = request.sampling
    has_penalty = params.presence_penalty != 0 or params.frequency_penalty != 0
    return params.grammar is not None or has_penalty or (params.seed is not None and params.temperature > 0)


def _ours(name: str) -> Value:
    """Return our field's value, where it is not the one that means off."""
    off = getattr(_UNSET, name)

    def value(request: GenerateRequest) -> Any:
        given = getattr(request.sampling, name)
        return None if given == off else given

    return value


def _list(name: str) -> Value:
    return lambda request: list(getattr(request.sampling, name)) or None


def _min_tokens(request: GenerateRequest) -> int | None:
    return max(request.sampling.min_tokens - len(request.resume_token_ids), 0) or None


def _seed(request: GenerateRequest) -> int | None:
    seed = request.sampling.seed
    return None if seed is None or request.sampling.temperature == 0 else seed & _MAX_SEED


def _bad_words(request: GenerateRequest) -> list[list[int]] | None:
    return [list(word) for word in request.sampling.bad_words] or None


def _lark(request: GenerateRequest) -> str | None:
    grammar = request.sampling.grammar
    return None if grammar is None else lark_of(grammar)


def _prompt_logprobs(request: GenerateRequest) -> int | None:
    return None if request.resume_token_ids else request.sampling.prompt_logprobs


_IDS_ONLY = "ids come in and go out; text is made of them outside of the engine"
_NOT_OFFERED = "no API of ours has it"

# fmt: off
FIELDS = (
    VllmField("n", "", "1: each of several answers is a request of its own"),
    VllmField("presence_penalty", "presence_penalty", "counts output only", _ours("presence_penalty")),
    VllmField("frequency_penalty", "frequency_penalty", "counts output only", _ours("frequency_penalty")),
    VllmField("repetition_penalty", "repetition_penalty", "counts prompt and output", _ours("repetition_penalty")),
    VllmField("temperature", "temperature", "0 is greedy", lambda request: request.sampling.temperature),
    VllmField("top_p", "top_p", "", _ours("top_p")),
    VllmField("top_k", "top_k", "0 is all", _ours("top_k")),
    VllmField("min_p", "min_p", "", _ours("min_p")),
    VllmField("seed", "seed", "of 63 bits", _seed),
    VllmField("stop", "", "stop strings are found in our own text, and the request is cancelled"),
    VllmField("stop_token_ids", "stop_token_ids", "and the model's ends, by vLLM itself", _list("stop_token_ids")),
    VllmField("ignore_eos", "ignore_eos", "", _ours("ignore_eos")),
    VllmField("max_tokens", "max_tokens", "less what was generated before a resume",
              lambda request: request.sampling.max_tokens - len(request.resume_token_ids)),
    VllmField("min_tokens", "min_tokens", "less what was generated before a resume", _min_tokens),
    VllmField("logprobs", "logprobs", "", _ours("logprobs")),
    VllmField("prompt_logprobs", "prompt_logprobs", "not after a resume", _prompt_logprobs),
    VllmField("prompt_logprob_token_ids", "", _NOT_OFFERED),
    VllmField("prompt_logprob_start", "", _NOT_OFFERED),
    VllmField("logprob_token_ids", "", _NOT_OFFERED),
    VllmField("flat_logprobs", "", _NOT_OFFERED),
    VllmField("detokenize", "", f"false: {_IDS_ONLY}", lambda request: False),
    VllmField("skip_special_tokens", "", _IDS_ONLY),
    VllmField("spaces_between_special_tokens", "", _IDS_ONLY),
    VllmField("include_stop_str_in_output", "", _IDS_ONLY),
    VllmField("output_kind", "", "DELTA: what is new"),
    VllmField("stream_interval", "", "tokens leave vLLM as they come"),
    VllmField("skip_clone", "", _NOT_OFFERED),
    VllmField("output_text_buffer_length", "", "vLLM's own"),
    VllmField("structured_outputs", "grammar", "in Lark, by the backend guidance", _lark),
    VllmField("logit_bias", "logit_bias", "", lambda request: dict(request.sampling.logit_bias) or None),
    VllmField("allowed_token_ids", "allowed_token_ids", "", _list("allowed_token_ids")),
    VllmField("extra_args", "", _NOT_OFFERED),
    VllmField("bad_words", "", "they come as token ids"),
    VllmField("_bad_words_token_ids", "bad_words", "", _bad_words),
    VllmField("skip_reading_prefix_cache", "", "vLLM's own choice, which leaves it out for prompt log probabilities"),
    VllmField("thinking_token_budget", "", "refused: vLLM would need a reasoning_config"),
    VllmField("repetition_detection", "", _NOT_OFFERED),
    VllmField("watermarking", "", _NOT_OFFERED),
    VllmField("trace_decode_token_ids", "", _NOT_OFFERED),
    VllmField("routed_experts_prompt_start", "", _NOT_OFFERED),
)
"""Every field of vLLM's SamplingParams."""
# fmt: on
