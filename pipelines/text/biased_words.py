"""Words that shall come more or less often, as what is added to the logits of their tokens."""

from collections.abc import Mapping

from pipelines.text.tokenizer import Tokenizer
from sluice.errors import SluiceError, invalid

MAX_BIASED_WORDS = 256
MAX_BIASED_WORD_LENGTH = 1024
"""Characters."""
MAX_BIAS = 100.0
_WORDS, _WEIGHTS = "embedding_bias_words", "embedding_bias_weights"


def with_biased_words(
    tokenizer: Tokenizer, words: tuple[tuple[str, float], ...], biases: Mapping[int, float]
) -> dict[int, float]:
    """`biases` of tokens, by their ids, and on top the weights of all words that each is part of, as NVIDIA has it.

    Raises SluiceError INVALID for too many or too long words, and where a token would get more than it may.
    """
    _check(words)
    total = dict(biases)
    for word, weight in words:
        for token_id in tokenizer.encode_words(word, _WORDS):
            total[token_id] = total.get(token_id, 0.0) + weight
    wrong = next((bias for bias in total.values() if not -MAX_BIAS <= bias <= MAX_BIAS), None)
    if wrong is not None:
        raise _too_much(wrong)
    return total


def _check(words: tuple[tuple[str, float], ...]) -> None:
    if len(words) > MAX_BIASED_WORDS:
        raise invalid(_WORDS, f"{_WORDS} has {len(words)} strings; at most {MAX_BIASED_WORDS} are allowed")
    for index, (word, _) in enumerate(words):
        if len(word) > MAX_BIASED_WORD_LENGTH:
            raise invalid(_WORDS, f"{_WORDS}[{index}] must have at most {MAX_BIASED_WORD_LENGTH} characters")


def _too_much(bias: float) -> SluiceError:
    allowed = f"between {-MAX_BIAS:g} and {MAX_BIAS:g} for each token, all its words together"
    return invalid(_WEIGHTS, f"{_WEIGHTS} must be {allowed}, got {bias:g}")
