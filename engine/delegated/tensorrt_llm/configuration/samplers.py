"""Which sampler is used, and which of our sampling parameters it would not act on, without saying so."""

from engine.delegated.tensorrt_llm.configuration import objects
from engine.delegated.tensorrt_llm.configuration.wishes import Strength, Wishes
from engine.delegated.tensorrt_llm.library import Library
from engine.delegated.tensorrt_llm.versions import is_before

ALL_PARAMETERS = "TRTLLMSampler"
"""The sampler that acts on all of them."""

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


def choose_sampler(wishes: Wishes, library: Library, *, is_engine: bool) -> None:
    """Before 1.3 the library's own choice is one that ignores penalties. With speculation it has a sampler of its own,
    whatever is asked for."""
    has_choice = not is_engine and is_before(library.version, "1.3") and not wishes.within(objects.SPECULATION)
    if has_choice:
        wishes.add("sampler_type", ALL_PARAMETERS, "the adapter", Strength.DEFAULT)


def ignored_fields(wishes: Wishes, library: Library, max_beam_width: int, *, is_engine: bool) -> frozenset[str]:
    """Before 1.3 the choice "auto" is one that acts on all only where there may be several beams."""
    if is_engine or not is_before(library.version, "1.3"):
        return frozenset()
    sampler = wishes.get("sampler_type", "auto")
    has_all = sampler == ALL_PARAMETERS or (sampler == "auto" and max_beam_width > 1)
    return frozenset() if has_all and not wishes.within(objects.SPECULATION) else WITHOUT_PENALTIES
