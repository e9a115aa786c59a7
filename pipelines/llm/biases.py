"""TensorRT-LLM's inputs that make tokens more or less likely: one bias for each token, or words and their weights."""

from pipelines.llm.values import Values
from pipelines.text.biased_words import MAX_BIAS
from sluice.errors import invalid

_TOKENS, _WORDS, _WEIGHTS = "embedding_bias", "embedding_bias_words", "embedding_bias_weights"


def token_biases(values: Values, vocab_size: int) -> dict[int, float] | None:
    """By token id. A vocabulary's padding may be missing or there, as long as it is 0."""
    biases: dict[int, float] | None = values.get(_TOKENS)
    for token_id, bias in (biases or {}).items():
        if token_id >= vocab_size:
            message = (
                f"must be 0 for what is no token of this model, which has {vocab_size}, got {bias:g} at {token_id}"
            )
            raise invalid(_TOKENS, f"input '{_TOKENS}' {message}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            message = (
                f"must be between {-MAX_BIAS:g} and {MAX_BIAS:g} for each token, got {bias:g} for token {token_id}"
            )
            raise invalid(_TOKENS, f"input '{_TOKENS}' {message}")
    return biases


def biased_words(values: Values) -> tuple[tuple[str, float], ...]:
    """Two lists of one length. Clients send "" and 0 for none."""
    words, weights = values.get(_WORDS, []), values.get(_WEIGHTS, [])
    if len(words) != len(weights) and (any(words) or any(weights)):
        message = f"input '{_WEIGHTS}' has {len(weights)} elements for the {len(words)} of {_WORDS}"
        raise invalid(_WEIGHTS, message)
    return tuple((word, weight) for word, weight in zip(words, weights, strict=False) if word and weight)
