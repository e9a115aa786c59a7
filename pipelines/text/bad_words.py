"""Words that must not come, as the token sequences that spell them."""

from pipelines.text.tokenizer import Tokenizer
from sluice.errors import invalid

MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 1024
"""Characters. Both limits bound what each sampled token costs to check."""


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and after a space, as transformers and vLLM have it.

    Raises SluiceError INVALID where a word is empty or too long, or there are too many.
    """
    _check(words)
    spelled = {
        tuple(tokenizer.encode_words(prefix + word.lstrip(), "bad_words")): None
        for word in words
        for prefix in ("", " ")
    }
    return tuple(spelled)


def _check(words: tuple[str, ...]) -> None:
    if len(words) > MAX_BAD_WORDS:
        raise invalid("bad_words", f"bad_words has {len(words)} strings; at most {MAX_BAD_WORDS} are allowed")
    for index, word in enumerate(words):
        if not word.strip() or len(word) > MAX_BAD_WORD_LENGTH:
            raise invalid(
                "bad_words",
                f"bad_words[{index}] must have from 1 to {MAX_BAD_WORD_LENGTH} characters, and not spaces alone",
            )
