"""What the samplers of each version leave out: fields that they ignore, and requests that they refuse.

Written from NVIDIA's sources and pull requests by version, and from nothing of the adapter's.
"""

from dataclasses import replace
from typing import Any

from packaging.version import Version

from .settings import settings

_ONE_MODEL = {"MTP", "Eagle", "Eagle3", "PARD", "SA", "DFlash"}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_DECAY = ("top_p_min", "top_p_decay", "top_p_reset_ids")
_EDITS = ("min_tokens", "bad_token_ids", "no_repeat_ngram_size", "embedding_bias", *_DECAY)


def is_since(version: str) -> bool:
    """Return whether the stand-in is of this version or a later one."""
    return Version(settings().version) >= Version(version)


class Sampler:
    """The sampler that an LLM's arguments lead to. Raises ValueError for one that the version does not have."""

    def __init__(self, args: Any, *, is_engine: bool) -> None:
        self._width = args.max_beam_width or 1
        self._speculation = None if is_engine else getattr(args, "speculative_config", None)
        kind = str(getattr(self._speculation, "decoding_type", ""))
        self._is_one_model = kind in _ONE_MODEL and getattr(self._speculation, "eagle3_one_model", True) is not False
        asked = str(getattr(args, "sampler_type", "auto"))
        if asked == "TRTLLMSampler" and is_since("1.3.0rc26"):
            raise ValueError("sampler_type='TRTLLMSampler' has been removed; TorchSampler is the only sampler")
        self._is_full = is_engine or (asked == "TRTLLMSampler" and self._speculation is None)
        """Whether the C++ decoder samples."""
        self._is_engine = is_engine
        self._gathers_logits = is_engine and bool(getattr(args, "gather_generation_logits", False))
        if self._is_one_model and self._width > 1:
            raise ValueError("beam width must be 1 for speculative decoding")

    @property
    def has_one_logprob(self) -> bool:
        """Whether only the sampled token has a log probability, however many are asked for."""
        return self._is_full and not self._is_engine

    def _is_on(self, name: str) -> bool:
        return bool(getattr(self._speculation, name, False))

    def _ignored(self) -> set[str]:
        if self._is_full:
            return set()
        if not self._is_one_model:
            july = set() if is_since("1.3.0rc24") else {*_PENALTIES, "bad_token_ids", "no_repeat_ngram_size", "min_p"}
            decay = set() if is_since("1.3.0rc24") else set(_DECAY)
            return july | decay | (set() if is_since("1.3.0rc25") else {"seed"})
        names = {*_EDITS, "min_p", "logprobs", "prompt_logprobs"}
        if not self._is_on("enable_penalty"):
            names |= set(_PENALTIES)
        if not is_since("1.3.0rc26"):
            names.add("seed")
        if not (is_since("1.3.0rc21") or self._is_on("allow_advanced_sampling")):
            names |= {"temperature", "top_k", "top_p"}
        return names

    def effective(self, params: Any) -> Any:
        """Return the parameters that have an effect."""
        left_out = dict.fromkeys(self._ignored())
        end_id, pad_id = params.end_id, params.pad_id
        made = replace(params, **left_out)
        made.end_id, made.pad_id, made._stop_word_ids = end_id, pad_id, params._stop_word_ids
        return made

    def refusal(self, params: Any) -> str | None:
        """Return why the worker refuses a request."""
        width = params.best_of if params.use_beam_search else 1
        needs_equal = self._is_full or not is_since("1.3.0rc25")
        if width != self._width and (needs_equal or width > self._width):
            return f"Request beam width {width} is not equal to max_beam_width {self._width}. This is not supported!"
        if self._width > 1 and params.logprobs is not None:
            if params.logprobs > 0:
                return "Beam search does not support returning multiple logprobs per request"
            if width != self._width:
                return f"Request beam width {width} is below max_beam_width {self._width}: log probs are not supported"
        if self._is_engine and params.logprobs is not None and not self._gathers_logits:
            return "logprobs needs gather_generation_logits=True, which is not set"
        return self._one_model_refusal(params) if self._is_one_model else None

    def _one_model_refusal(self, params: Any) -> str | None:
        if params.min_p and is_since("1.3.0rc24"):
            return "min_p is not supported with one-model speculative decoding."
        for name in _EDITS:
            if is_since("1.3.0rc26") and getattr(params, name) not in (None, [], 0):
                return f"{name} is not supported with one-model speculative decoding."
        if not is_since("1.3.0rc27"):
            return None
        if any(getattr(params, name) is not None for name in _PENALTIES) and not self._is_on("enable_penalty"):
            return "penalties require 'enable_penalty: true' in the speculative decoding config"
        if params.logprobs is not None or params.prompt_logprobs is not None:
            return "The following output options are not supported with speculative decoding: logprobs."
        return None
