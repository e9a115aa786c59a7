"""How tokens are sampled: a model's defaults, fields of some runtimes only, bad words, biased words.
`build_request_parameters` translates a request's fields for a language model that is called through tensors."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from sluice.engine.sampling_fields import MAX_BIAS, OPTIONAL_FIELDS, SAMPLING_FIELDS
from sluice.engine.types import EngineInfo, Grammar, GrammarKind, SamplingParams
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.text.tokenizer import Tokenizer
from sluice.pipelines.text.types import AS_IT_IS, SamplingOverrides, TextForm, TextRequest

RequestParameters = dict[str, str | int | float | bool]

MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024
"""Characters. Both limits bound the cost of checking each sampled token."""
MAX_BIASED_WORDS = 256
MAX_BIASED_WORD_LENGTH = 1024
"""Characters."""
_BIAS_WORDS, _BIAS_WEIGHTS = "embedding_bias_words", "embedding_bias_weights"

_IN_SAMPLING_CONFIG = ("top_k", "stop_token_ids")
"""Fields whose request parameter is part of `sampling_config`."""
_CHOOSING = ("top_k", "top_p", "min_p", "typical_p")
"""Fields with any of which TensorRT-LLM samples by a temperature."""
_GUIDE_TYPES = {
    GrammarKind.JSON_OBJECT: "json",
    GrammarKind.JSON_SCHEMA: "json_schema",
    GrammarKind.REGEX: "regex",
    GrammarKind.EBNF: "ebnf_grammar",
}


_GenerationConfig = msgspec.defstruct(
    "_GenerationConfig",
    [
        ("do_sample", bool | None, None),
        *((each.name, each.kind.value | None, None) for each in SAMPLING_FIELDS.values() if each.is_model_default),
    ],
    kw_only=True,
)
"""The part of a checkpoint's `generation_config.json` that has a model's defaults for sampling fields."""


class SamplingDefaults(dict[str, Any]):
    """A model's values for sampling fields that a request leaves out. Those the model leaves out are OpenAI's."""

    def resolve(self, sent: SamplingOverrides, max_tokens: int) -> SamplingParams:
        """Return the client's fields over these defaults, with the caller's `max_tokens`."""
        return SamplingParams(**{**self, **drop_random_seed(sent), "max_tokens": max_tokens})


def load_sampling_defaults(model_path: Path) -> SamplingDefaults:
    """Read the checkpoint's `generation_config.json`, which may be missing. `do_sample: false` means greedy. Raises
    UNAVAILABLE for a file that cannot be decoded."""
    path = model_path / "generation_config.json"
    if not path.exists():
        return SamplingDefaults()
    try:
        config = msgspec.json.decode(path.read_bytes(), type=_GenerationConfig)
    except (OSError, ValueError, RecursionError) as error:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"cannot read {path}: {error}") from error
    fields = {name: value for name, value in msgspec.structs.asdict(config).items() if value is not None}
    if fields.pop("do_sample", True) is False:
        fields["temperature"] = 0.0
    return SamplingDefaults(fields)


def drop_random_seed(sent: SamplingOverrides) -> SamplingOverrides:
    """Return `sent` without a seed that asks for none, so that each sequence gets one of its own."""
    if sent.get("seed") not in SAMPLING_FIELDS["seed"].off:
        return sent
    return {name: value for name, value in sent.items() if name != "seed"}


def drop_neutral_fields(sent: SamplingOverrides, supported: Collection[str]) -> SamplingOverrides:
    """Return `sent` without optional fields whose value has no effect: clients of TensorRT-LLM send 0 for absent ones.
    `supported` are the `EngineInfo.sampling_fields` of the runtime."""
    return {
        name: value
        for name, value in sent.items()
        if name not in OPTIONAL_FIELDS or not SAMPLING_FIELDS[name].is_neutral(value, supported)
    }


@contextmanager
def default_max_tokens(request: TextRequest) -> Iterator[None]:
    """Make the errors of a context say that `max_tokens` is the default, where `request` has none."""
    try:
        yield
    except SluiceError as error:
        if "max_tokens" not in request.sampling:
            error.describe("max_tokens", "the default max_tokens")
        raise


def tokenize_bad_words(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of each word at the start of a text and after a space, as transformers and vLLM do. Raises
    INVALID where a word is empty or too long, or where there are too many."""
    _check_bad_words(words)
    spelled = {
        tuple(tokenizer.encode_words(prefix + word.lstrip(), "bad_words")): None
        for word in words
        for prefix in ("", " ")
    }
    return tuple(spelled)


def _check_bad_words(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"bad_words has {len(words)} strings; at most {MAX_BAD_WORDS} are allowed")
    for index, word in enumerate(words):
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise invalid(
                "bad_words",
                f"bad_words[{index}] must have from 1 to {MAX_BAD_WORD_LENGTH} characters, and not spaces alone",
            )


def add_word_biases(
    tokenizer: Tokenizer, words: tuple[tuple[str, float], ...], biases: Mapping[int, float]
) -> dict[int, float]:
    """Return `biases` by token id, plus the weight of each word on each of its tokens, as NVIDIA's models do. Raises
    INVALID for too many or too long words, and where a token's sum is out of range."""
    _check_biased_words(words)
    total = dict(biases)
    for word, weight in words:
        for token_id in tokenizer.encode_words(word, _BIAS_WORDS):
            total[token_id] = total.get(token_id, 0.0) + weight
    wrong = next((bias for bias in total.values() if not -MAX_BIAS <= bias <= MAX_BIAS), None)
    if wrong is not None:
        allowed = f"between {-MAX_BIAS:g} and {MAX_BIAS:g} for each token, all its words together"
        raise invalid(_BIAS_WEIGHTS, f"{_BIAS_WEIGHTS} must be {allowed}, got {wrong:g}")
    return total


async def add_words(sampling: SamplingParams, request: TextRequest, tokenizer: Tokenizer) -> SamplingParams:
    """Return `sampling` with the tokens of the words of `request`. Raises as the functions above."""

    def add() -> SamplingParams:
        bad_words = tokenize_bad_words(tokenizer, request.bad_words) if request.bad_words else sampling.bad_words
        biases = add_word_biases(tokenizer, request.biased_words, sampling.logit_bias)
        return msgspec.structs.replace(sampling, bad_words=bad_words, logit_bias=biases)

    num_chars = sum(map(len, request.bad_words)) + sum(len(word) for word, _ in request.biased_words)
    return await tokenizer.run(num_chars, add)


def add_end(sampling: SamplingParams, eos: int | None, info: EngineInfo) -> SamplingParams:
    """Add the tokenizer's end of sequence, which chat models often end turns with and the model does not name."""
    if eos is None or sampling.ignore_eos or eos in info.eos_token_ids:
        return sampling
    return msgspec.structs.replace(sampling, stop_token_ids=(*sampling.stop_token_ids, eos))


def _check_biased_words(words: tuple[tuple[str, float], ...]) -> None:
    if len(words) > MAX_BIASED_WORDS:
        raise invalid(_BIAS_WORDS, f"{_BIAS_WORDS} has {len(words)} strings; at most {MAX_BIASED_WORDS} are allowed")
    for index, (word, _) in enumerate(words):
        if len(word) > MAX_BIASED_WORD_LENGTH:
            raise invalid(_BIAS_WORDS, f"{_BIAS_WORDS}[{index}] must have at most {MAX_BIASED_WORD_LENGTH} characters")


def build_request_parameters(request: TextRequest, model: str) -> RequestParameters:
    """Return the client's sampling fields under the names of a language model's inputs (`pipelines/llm/fields.py`).
    Raises INVALID, naming the field, for one that would not reach the language model behind `model`."""
    sampling = drop_random_seed(drop_neutral_fields(request.sampling, ()))
    if request.default_max_tokens is not None:
        sampling.setdefault("max_tokens", request.default_max_tokens)
    parameters: RequestParameters = {}
    for name, value in sampling.items():
        if name == "grammar":
            parameters |= _guide_parameters(value, model)
        elif name in OPTIONAL_FIELDS or not SAMPLING_FIELDS[name].datatype:
            raise not_passed_on(name, model)
        elif name not in _IN_SAMPLING_CONFIG:
            parameters[name] = value
    if parameters.get("temperature") and sampling.keys().isdisjoint(_CHOOSING):
        parameters["top_p"] = 1.0  # a model of TensorRT-LLM's is greedy with a temperature alone
    if request.thinking_token_budget is not None:
        message = f"thinking_token_budget must be left out: it would not reach the language model behind '{model}'"
        raise invalid("thinking_token_budget", message)
    if request.structural_tag:
        raise not_passed_on("grammar", model)
    if request.echo:
        raise not_passed_on("echo", model)
    for name, default in msgspec.structs.asdict(TextForm()).items():
        if getattr(request.form, name) != default:
            raise not_passed_on(name, model)
    for name in ("suffix", "add_special_tokens", "truncate_prompt_tokens"):
        if getattr(request.prompt_form, name) != getattr(AS_IT_IS, name):
            raise not_passed_on(name, model)
    config = _sampling_config(request)
    if config:
        parameters["sampling_config"] = msgspec.json.encode(config).decode()
    if request.cache_salt:
        parameters["cache_salt"] = request.cache_salt
    return parameters | {"return_num_input_tokens": True, "return_num_output_tokens": True}


def _sampling_config(request: TextRequest) -> dict[str, object]:
    """Return the fields for `sampling_config`: lists, and `top_k`, which retrieving steps have as a parameter too."""
    config: dict[str, object] = {name: request.sampling.get(name) for name in _IN_SAMPLING_CONFIG}
    config |= {"stop_words": request.stop, "bad_words": request.bad_words}
    return {name: value for name, value in config.items() if value is not None and value != ()}


def _guide_parameters(grammar: Grammar, model: str) -> RequestParameters:
    kind = _GUIDE_TYPES.get(grammar.kind)
    if kind is None or grammar.whitespace is not None:
        raise not_passed_on("grammar", model, f"; constraints that are: {', '.join(_GUIDE_TYPES.values())}")
    guide: RequestParameters = {"guided_decoding_guide": grammar.text} if grammar.text else {}
    return {"guided_decoding_guide_type": kind} | guide


def not_passed_on(name: str, model: str, more: str = "") -> SluiceError:
    """Return the refusal of a field that does not reach the language model behind `model`."""
    return invalid(
        name, f"{name} is not passed on by model '{model}', whose language model is a step among others{more}"
    )
