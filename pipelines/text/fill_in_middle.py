"""Prompts for what stands between a prefix and a suffix, as models of code take them."""

from collections.abc import Container
from typing import NamedTuple

from sluice.errors import invalid


class FillInTokens(NamedTuple):
    """Tokens that stand before the prefix, before the suffix, and where the model shall begin."""

    prefix: str
    suffix: str
    middle: str


FORMATS = (
    FillInTokens("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    FillInTokens("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    FillInTokens("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    FillInTokens("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    FillInTokens("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


def fill_in_prompt(prefix: str, suffix: str, vocabulary: Container[str]) -> str:
    """Return the text of a prompt. Raises INVALID (param "suffix") for a vocabulary without tokens for it."""
    tokens = next((each for each in FORMATS if all(token in vocabulary for token in each)), None)
    if tokens is None:
        known = ", ".join(each.prefix for each in FORMATS)
        reason = f"the model's tokenizer has no tokens to fill in a middle with (such as {known})"
        raise invalid("suffix", f"suffix must be left out: {reason}")
    return f"{tokens.prefix}{prefix}{tokens.suffix}{suffix}{tokens.middle}"
