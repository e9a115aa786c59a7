"""Which of our sampling parameters the sampler of a version would not act on, without saying so."""

from engine.tensorrt_llm.library import Library
from engine.tensorrt_llm.versions import is_before
from engine.tensorrt_llm.wishes import Wishes

WITHOUT_PENALTIES = frozenset(
    {
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "bad_words",
        "no_repeat_ngram_size",
        "top_p_min",
        "top_p_decay",
        "top_p_reset_ids",
    }
)
"""What TorchSampler takes and ignores before 1.3 (TensorRT-LLM's pull requests 16052, 16485 and 16594)."""


def ignored_fields(wishes: Wishes, library: Library, max_beam_width: int, *, is_engine: bool) -> frozenset[str]:
    """Before 1.3 the choice "auto" is TRTLLMSampler, which acts on all, only where there may be several beams."""
    if is_engine or not is_before(library.version, "1.3"):
        return frozenset()
    sampler = wishes.get("sampler_type", "auto")
    has_all = sampler == "TRTLLMSampler" or (sampler == "auto" and max_beam_width > 1)
    return frozenset() if has_all else WITHOUT_PENALTIES
