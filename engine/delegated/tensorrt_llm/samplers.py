"""TensorRT-LLM's samplers obey, refuse or ignore our sampling fields, by version.

NVIDIA's release candidates differ, so versions are compared whole: 1.3.0rc5 is before 1.3.0rc24. A version stands here
where it is known to act on a field. A field without a row is obeyed by every version; what is not obeyed is refused
before it reaches TensorRT-LLM, so that nobody gets an answer that leaves out what was asked for.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from packaging.version import Version

from sluice.engine.types import SamplingParams
from sluice.errors import invalid


class SamplerKind(Enum):
    """The code that chooses a model's tokens."""

    TORCH = "TorchSampler"
    TRTLLM = "TRTLLMSampler"
    ONE_MODEL = "speculation by one model"
    ENGINE = "compiled engine"


class SamplerEffect(Enum):
    """A sampler acts on a field's value, answers with an error, or leaves it out."""

    OBEYED = "obeyed"
    REFUSED = "refused"
    """TensorRT-LLM itself answers with an error."""
    IGNORED = "ignored"
    """TensorRT-LLM takes the value and answers as if it were not there."""


PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
TOP_P_DECAY = ("top_p_min", "top_p_decay", "top_p_reset_ids")
BEAMS_SINCE = "1.3.0rc25"
"""Before it every request must be as wide as max_beam_width, those without a beam search too (NVIDIA's pull 16620)."""
PENALTIES_SINCE = "1.3.0rc24"
"""Before it TorchSampler, the library's own choice, ignores penalties (pull 16485) and most filters."""
GATHER_GENERATION = "gather_generation_logits"
GATHER_CONTEXT = "gather_context_logits"
ENABLE_PENALTY = "speculative_config.enable_penalty"
ADVANCED_SAMPLING = "speculative_config.allow_advanced_sampling"
ADVANCED_SINCE = "1.3.0rc21"
"""From it on speculation by one model samples without that argument (pull 14745)."""

_OTHER_SAMPLER = (
    "start the model without speculation and with the setting sampler_type=TRTLLMSampler, or use TensorRT-LLM "
    "{version} or later"
)
_NO_SPECULATION = "start the model without speculation"


class Row(NamedTuple):
    """One sampler treats these fields alike."""

    sampler: SamplerKind
    fields: tuple[str, ...]
    obeyed_since: str = ""
    """The first version that acts on them; "" for none."""
    refused_since: str = ""
    """The first version that refuses them where it does not obey; earlier ones ignore them."""
    argument: str = ""
    """The argument of the LLM class (or of the engine's build) with which they are obeyed in any version that has it;
    "" for none."""
    above: int = -1
    """Only values above this are concerned."""
    remedy: str = ""
    """The end of a message: it says what the operator can do."""

    def effect(self, version: Version, arguments: Collection[str]) -> SamplerEffect:
        """Return what becomes of the fields where `arguments` are on."""
        is_on = bool(self.argument) and self.argument in arguments
        if is_on or (self.obeyed_since and version >= Version(self.obeyed_since)):
            return SamplerEffect.OBEYED
        is_refused = bool(self.refused_since) and version >= Version(self.refused_since)
        return SamplerEffect.REFUSED if is_refused else SamplerEffect.IGNORED


# fmt: off
ROWS = (
    Row(SamplerKind.TORCH, PENALTIES, PENALTIES_SINCE, remedy=_OTHER_SAMPLER),
    Row(SamplerKind.TORCH, ("no_repeat_ngram_size", "min_p", *TOP_P_DECAY), "1.3.0rc24", remedy=_OTHER_SAMPLER),
    Row(SamplerKind.TORCH, ("bad_words",), "1.3.0rc24", remedy=_OTHER_SAMPLER),
    Row(SamplerKind.TORCH, ("seed",), "1.3.0rc25", remedy=_OTHER_SAMPLER),
    Row(SamplerKind.TRTLLM, ("logprobs",), above=1,
        remedy="start it with the setting sampler_type=TorchSampler, which returns several"),
    Row(SamplerKind.ONE_MODEL, ("temperature",), ADVANCED_SINCE, argument=ADVANCED_SAMPLING,
        remedy="use TensorRT-LLM {version} or later, or " + _NO_SPECULATION),
    Row(SamplerKind.ONE_MODEL, ("seed",), "1.3.0rc26",
        remedy="use TensorRT-LLM {version} or later, or " + _NO_SPECULATION),
    Row(SamplerKind.ONE_MODEL, PENALTIES, refused_since="1.3.0rc27", argument=ENABLE_PENALTY,
        remedy="set enable_penalty in the speculative configuration, where the version has it, or " + _NO_SPECULATION),
    Row(SamplerKind.ONE_MODEL, ("min_p",), refused_since="1.3.0rc24", remedy=_NO_SPECULATION),
    Row(SamplerKind.ONE_MODEL, ("min_tokens", "logit_bias", "allowed_token_ids", "bad_words", "no_repeat_ngram_size",
                                *TOP_P_DECAY), refused_since="1.3.0rc26", remedy=_NO_SPECULATION),
    Row(SamplerKind.ONE_MODEL, ("logprobs", "prompt_logprobs"), refused_since="1.3.0rc27", remedy=_NO_SPECULATION),
    Row(SamplerKind.ENGINE, ("logprobs",), refused_since="1.2", argument=GATHER_GENERATION,
        remedy="start it with the argument gather_generation_logits"),
    Row(SamplerKind.ENGINE, ("prompt_logprobs",), refused_since="1.2", argument=GATHER_CONTEXT,
        remedy="compile it with gather_context_logits"),
)
"""All that some version does not obey."""
# fmt: on

ONE_MODEL_SINCE = {
    "MTP": "1.2",
    "Eagle": "1.2",
    "Eagle3": "1.2",
    "PARD": "1.2",
    "SA": "1.2",
    "DFlash": "1.2",
    "DSpark": "1.2",
    "Draft_Target": "1.3.0rc1",
}
"""Types of speculation that run in the model itself, with a sampler of their own, and the first versions that do so."""
_TWO_MODELS_UNTIL = "1.3.0rc1"
"""From it on Eagle3 is taken to run in the model, whatever eagle3_one_model says: later versions leave it unread."""


def is_one_model(kind: str, version: Version, *, may_be_two: bool = False) -> bool:
    """Return whether speculation of this type brings a sampler of its own. `may_be_two`: eagle3_one_model is false."""
    since = _TWO_MODELS_UNTIL if may_be_two else ONE_MODEL_SINCE.get(kind)
    return kind in ONE_MODEL_SINCE and since is not None and version >= Version(since)


@dataclass(frozen=True, slots=True)
class ModelSampler:
    """The sampler of a loaded model."""

    kind: SamplerKind
    version: Version
    arguments: frozenset[str] = frozenset()
    """The arguments of `Row.argument` that are on."""
    max_beam_width: int = 1

    @property
    def is_compiled(self) -> bool:
        return self.kind is SamplerKind.ENGINE

    @property
    def _unobeyed(self) -> Iterator[tuple[str, Row]]:
        for row in ROWS:
            if row.sampler is self.kind and row.effect(self.version, self.arguments) is not SamplerEffect.OBEYED:
                yield from ((name, row) for name in row.fields)

    @property
    def bans_by_bias(self) -> bool:
        """Whether bad words of one token must be biases, since the sampler has biases but no bad words."""
        names = {name for name, _ in self._unobeyed}
        return "bad_words" in names and "logit_bias" not in names

    @property
    def refusals(self) -> Mapping[str, str]:
        """Why a request is refused that has these fields, at any value but their default."""
        return {
            name: self._sentence(name, row)
            for name, row in self._unobeyed
            if row.above < 0 and name != "temperature" and not (name == "bad_words" and self.bans_by_bias)
        }

    def check(self, params: SamplingParams) -> None:
        """Raise INVALID for a value that this sampler would not act on, as far as `refusals` do not name its field."""
        for name, row in self._unobeyed:
            value = getattr(params, name)
            if name == "temperature" and value > 0:
                raise invalid(name, f"{self._sentence(name, row)}; only temperature 0 is what it does")
            if row.above >= 0 and value is not None and value > row.above:
                raise invalid(name, f"{self._sentence(f'{name} above {row.above}', row)}, got {value}")
        if self.max_beam_width > 1 and params.logprobs is not None:
            self._check_beam_logprobs(params.logprobs, params.beam_width)

    def _check_beam_logprobs(self, logprobs: int, width: int) -> None:
        if logprobs > 0:
            what = f"logprobs must be 0 (the token's own) where max_beam_width is above 1, got {logprobs}"
        elif width != self.max_beam_width:
            what = f"logprobs must be left out unless beam_width is {self.max_beam_width} (max_beam_width), got {width}"
        else:
            return
        raise invalid("logprobs", f"{what}: TensorRT-LLM {self.version} has no others with beams")

    def _sentence(self, what: str, row: Row) -> str:
        sampler = f"the {self.kind.value} of" if self.kind is not SamplerKind.ONE_MODEL else f"{self.kind.value} in"
        effect = "refuses" if row.effect(self.version, self.arguments) is SamplerEffect.REFUSED else "ignores"
        remedy = row.remedy.format(version=row.obeyed_since)
        return f"{what} cannot be used: {sampler} TensorRT-LLM {self.version} {effect} it; {remedy}"
