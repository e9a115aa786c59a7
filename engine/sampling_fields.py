"""The sampling fields that clients send, one row each.

Every protocol, check and runtime takes a field's name, type, range and help from here.
`sluice.engine.types.SamplingParams` has the values; a test compares the two. The token sequences of `bad_words` and the
grammar have no row: protocols make them of fields of their own.
"""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from sluice.engine.types import SamplingParams
from sluice.errors import invalid, named

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_BIAS = 100.0
"""Largest absolute value of a token's bias."""
_MAX_INT32 = 2**31 - 1
_DEFAULTS = SamplingParams()


class FieldKind(Enum):
    """The type of a field's values."""

    FLOAT = float
    INTEGER = int
    BOOLEAN = bool
    SWITCH = "an integer, of which clients may also send true or false"
    TOKEN_IDS = "token ids"
    TOKEN_BIASES = "numbers by token id"

    @property
    def is_scalar(self) -> bool:
        return self not in (FieldKind.TOKEN_IDS, FieldKind.TOKEN_BIASES)


class FieldOrigin(Enum):
    """The API that a field comes from, which decides which hosted APIs have it."""

    OPENAI = "OpenAI"
    VLLM = "vLLM"
    TRANSFORMERS = "transformers"
    TENSORRT_LLM = "TensorRT-LLM"
    """Only some runtimes have the field (`EngineInfo.sampling_fields`)."""


@dataclass(frozen=True, slots=True)
class ValueRange:
    """The numbers from `low` to `high`, both included, but those in `excluded`. `text` says it in messages."""

    low: float
    high: float
    text: str
    excluded: tuple[float, ...] = ()

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high and value not in self.excluded


def _between(low: float, high: float) -> ValueRange:
    low_text, high_text = (f"{bound:g}" if isinstance(bound, float) else str(bound) for bound in (low, high))
    return ValueRange(low, high, f"between {low_text} and {high_text}")


_FRACTION = ValueRange(0.0, 1.0, "greater than 0 and at most 1", excluded=(0.0,))
_NOT_NEGATIVE = ValueRange(0.0, math.inf, "0 or more", excluded=(math.inf,))


@dataclass(frozen=True, slots=True)
class SamplingField:
    """A sampling field. `help` says in API documentation what it does and which values it takes.

    `allowed` are the values of a number, or of each element of a list.
    """

    name: str
    kind: FieldKind
    origin: FieldOrigin
    help: str
    allowed: ValueRange | None = None
    off: tuple[Any, ...] = ()
    """Values that switch the field off. A hosted API without the field accepts them."""
    neutral: tuple[Any, ...] = ()
    """Further values that a runtime without the field accepts, since they change nothing there."""
    is_detail: bool = False
    """Whether the field refines another one, so that no value has an effect on a runtime without that one."""
    is_model_default: bool = False
    """Whether a checkpoint's generation_config.json may have a default for it."""
    enables_sampling: bool = False
    """Whether a v2 request that has it samples; requests with no such field are greedy, as TensorRT-LLM's are."""
    is_in_openai: bool = True
    """Whether the OpenAI routes have it as it is, and not as a field of each route."""
    openai_minimum: int | None = None
    """The least value that the OpenAI schemas accept, where it is not the least of `allowed`."""
    max_length: int = 4096
    """Most elements of a list."""
    datatype: str = ""
    """The v2 datatype of its input, "" where there is none."""
    aliases: tuple[str, ...] = ()
    """Other names of the input."""
    tensor_help: str = ""
    """Further help about the input alone."""
    is_declared: bool = True
    """Whether the input is declared for a model that declares none itself."""

    @property
    def default(self) -> Any:
        """The value where neither the request nor the model has one. None: the runtime's own."""
        return getattr(_DEFAULTS, self.name)

    @property
    def is_optional(self) -> bool:
        """Whether only some runtimes have it (`EngineInfo.sampling_fields`)."""
        return self.origin is FieldOrigin.TENSORRT_LLM

    def check(self, value: Any) -> None:
        """Raise SluiceError INVALID for a value that is not allowed. None stands for no value."""
        if value is None or self.allowed is None:
            return
        if isinstance(value, Mapping) and all(map(self.allowed.__contains__, value.values())):
            return  # at once: there may be one for each token of the vocabulary
        for place, number in self._numbers(value):
            if number not in self.allowed:
                raise invalid(self.name, f"{named(self.name)}{place} must be {self.allowed.text}, got {number}")

    def _numbers(self, value: Any) -> Iterable[tuple[str, float]]:
        """Return the numbers in a value, each with its place in messages."""
        if isinstance(value, Mapping):
            return ((f" of token {token_id}", bias) for token_id, bias in value.items())
        return (("", each) for each in (value if isinstance(value, tuple) else (value,)))

    def is_neutral(self, value: Any, supported: Collection[str]) -> bool:
        """Return whether a value of an optional field changes nothing where the runtime's are `supported`."""
        return value in self.off or (self.name not in supported and (self.is_detail or value in self.neutral))


# fmt: off
_ROWS = (
    SamplingField("max_tokens", FieldKind.INTEGER, FieldOrigin.OPENAI,
                  "Most tokens to generate.",
                  allowed=ValueRange(1, math.inf, "1 or more"), is_in_openai=False, datatype="INT32",
                  aliases=("request_output_len",),
                  tensor_help="Where absent 16, with messages all that the context has."),
    SamplingField("temperature", FieldKind.FLOAT, FieldOrigin.OPENAI,
                  "Randomness: 0 to 2; 0 is greedy.",
                  allowed=_between(0.0, 2.0), is_model_default=True, enables_sampling=True, datatype="FP32",
                  tensor_help="Without temperature, top_k, top_p, min_p and typical_p decoding is greedy."),
    SamplingField("top_k", FieldKind.INTEGER, FieldOrigin.VLLM,
                  "Sample from this many most likely tokens; 0 (off) is all.",
                  allowed=ValueRange(0, _MAX_INT32, f"between 0 (off) and {_MAX_INT32}"), off=(0, -1),
                  is_model_default=True, enables_sampling=True, openai_minimum=-1, datatype="INT32",
                  aliases=("runtime_top_k",)),
    SamplingField("top_p", FieldKind.FLOAT, FieldOrigin.OPENAI,
                  "Sample from the most likely tokens that together have this probability; above 0, at most 1 (off).",
                  allowed=_FRACTION, off=(1.0,), is_model_default=True, enables_sampling=True, datatype="FP32",
                  aliases=("runtime_top_p",)),
    SamplingField("min_p", FieldKind.FLOAT, FieldOrigin.VLLM,
                  "Sample from tokens at least this fraction as likely as the likeliest; 0 (off) to 1.",
                  allowed=_between(0.0, 1.0), off=(0.0,), is_model_default=True, enables_sampling=True,
                  datatype="FP32"),
    SamplingField("typical_p", FieldKind.FLOAT, FieldOrigin.TRANSFORMERS,
                  "Sample from tokens about as likely as is to be expected; above 0, at most 1 (off).",
                  allowed=_FRACTION, off=(1.0,), is_model_default=True, enables_sampling=True, datatype="FP32"),
    SamplingField("seed", FieldKind.INTEGER, FieldOrigin.OPENAI,
                  "Makes sampling repeatable; 0 or more, in JSON also negative. -1 is random, as without one.",
                  allowed=_between(0, MAX_SEED), off=(-1,), openai_minimum=-(2**63), datatype="UINT64",
                  aliases=("random_seed",)),
    SamplingField("repetition_penalty", FieldKind.FLOAT, FieldOrigin.VLLM,
                  "Above 1, tokens of prompt and text become less likely; above 0, 1 is off.",
                  allowed=ValueRange(0.0, math.inf, "greater than 0", excluded=(0.0, math.inf)), off=(1.0,),
                  is_model_default=True, datatype="FP32"),
    SamplingField("presence_penalty", FieldKind.FLOAT, FieldOrigin.OPENAI,
                  "Taken once from the logits of tokens that the text has; -2 to 2.",
                  allowed=_between(-2.0, 2.0), off=(0.0,), datatype="FP32"),
    SamplingField("frequency_penalty", FieldKind.FLOAT, FieldOrigin.OPENAI,
                  "Taken from a token's logit for each time that the text has it; -2 to 2.",
                  allowed=_between(-2.0, 2.0), off=(0.0,), datatype="FP32"),
    SamplingField("min_tokens", FieldKind.INTEGER, FieldOrigin.VLLM,
                  "Fewest tokens before the model may end the text.",
                  off=(0,), datatype="INT32", aliases=("min_length",)),
    SamplingField("ignore_eos", FieldKind.BOOLEAN, FieldOrigin.VLLM,
                  "Whether to go on to max_tokens past the model's own end.",
                  off=(False,), datatype="BOOL"),
    SamplingField("stop_token_ids", FieldKind.TOKEN_IDS, FieldOrigin.VLLM,
                  "Tokens that end the output; they are not part of it.",
                  allowed=_between(0, _MAX_INT32), off=([], ()), datatype="INT32", is_declared=False),
    SamplingField("logit_bias", FieldKind.TOKEN_BIASES, FieldOrigin.OPENAI,
                  "Added to the logits of token ids; -100 to 100.",
                  allowed=_between(-MAX_BIAS, MAX_BIAS)),
    SamplingField("allowed_token_ids", FieldKind.TOKEN_IDS, FieldOrigin.VLLM,
                  "The only tokens that the output may have, the end of sequence among them.",
                  allowed=_between(0, _MAX_INT32), max_length=1 << 14),
    SamplingField("logprobs", FieldKind.INTEGER, FieldOrigin.OPENAI,
                  "Log probabilities of each token and of so many of the likeliest.",
                  allowed=_between(0, MAX_LOGPROBS), is_in_openai=False),
    SamplingField("prompt_logprobs", FieldKind.INTEGER, FieldOrigin.VLLM,
                  "Log probabilities of each token of the prompt and of so many of the likeliest.",
                  allowed=_between(0, MAX_LOGPROBS), is_in_openai=False),
    SamplingField("beam_width", FieldKind.INTEGER, FieldOrigin.TENSORRT_LLM,
                  "Beams of a beam search, whose best one is the answer; 1 is off.",
                  neutral=(1,), openai_minimum=1, datatype="INT32"),
    SamplingField("length_penalty", FieldKind.FLOAT, FieldOrigin.TENSORRT_LLM,
                  "Preference of a beam search for long texts.",
                  allowed=_NOT_NEGATIVE, neutral=(0.0, 1.0), datatype="FP32", aliases=("len_penalty",)),
    SamplingField("early_stopping", FieldKind.SWITCH, FieldOrigin.TENSORRT_LLM,
                  "Whether a beam search ends once it has enough complete beams.",
                  allowed=_between(0, _MAX_INT32), is_detail=True, datatype="BOOL", is_declared=False),
    SamplingField("beam_search_diversity_rate", FieldKind.FLOAT, FieldOrigin.TENSORRT_LLM,
                  "How different the beams of a search shall be; 0 is off.",
                  allowed=_NOT_NEGATIVE, off=(0.0,), datatype="FP32", is_declared=False),
    SamplingField("no_repeat_ngram_size", FieldKind.INTEGER, FieldOrigin.TENSORRT_LLM,
                  "So many tokens in a row come once; 0 is off.",
                  allowed=_between(1, _MAX_INT32), off=(0,), datatype="INT32", is_declared=False),
    SamplingField("top_p_min", FieldKind.FLOAT, FieldOrigin.TENSORRT_LLM,
                  "Lower bound of a decaying top_p; 0 is off.",
                  allowed=_between(0.0, 1.0), off=(0.0,), datatype="FP32", aliases=("runtime_top_p_min",),
                  is_declared=False),
    SamplingField("top_p_decay", FieldKind.FLOAT, FieldOrigin.TENSORRT_LLM,
                  "Factor by which top_p decays at each token; 1 is off.",
                  allowed=_FRACTION, off=(0.0, 1.0), datatype="FP32", aliases=("runtime_top_p_decay",),
                  is_declared=False),
    SamplingField("top_p_reset_ids", FieldKind.INTEGER, FieldOrigin.TENSORRT_LLM,
                  "The token after which a decaying top_p begins anew.",
                  allowed=_between(0, _MAX_INT32), is_detail=True, datatype="INT32",
                  aliases=("runtime_top_p_reset_ids",), is_declared=False),
)
# fmt: on

SAMPLING_FIELDS: Mapping[str, SamplingField] = {each.name: each for each in _ROWS}
OPTIONAL_FIELDS = tuple(each.name for each in _ROWS if each.is_optional)
"""Fields that only some runtimes have (`EngineInfo.sampling_fields`)."""
