"""Prompts of a wanted length, random so that no cache of the server's makes them cheap."""

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from load.apis import Prompt
from load.config import Api, ConfigError, Workload

COMMON_WORDS = """
the of and to in is that for it as was with be by on not he his but at are this have from or had an they which one you
were her all she there would their we him been has when who will more no if out so said what up its about into than
them can only other new some could time these two may then do first any my now such like our over man me even most
"""

NUM_STABLE_WORDS = 512
MAX_FITTING_ROUNDS = 16


class PromptSource(Protocol):
    """Makes prompts. `exactness` tells the reader of a report what the lengths are worth."""

    exactness: str

    def make(self, rng: np.random.Generator, num_tokens: int) -> Prompt: ...


def prompt_source(api: Api, workload: Workload) -> PromptSource:
    """Token ids where the API takes them, else words: fitted by a tokenizer where there is one, else approximate."""
    if workload.tokenizer is not None:
        return FittedWords(workload.tokenizer)
    if api is Api.COMPLETIONS:
        return TokenIds(workload.vocab_size)
    return ApproximateWords()


class TokenIds:
    """Random token ids: exact, and no tokenizer takes part.

    The lowest quarter of the vocabulary is left out, where special tokens and single bytes usually are.
    """

    exactness = "exact: random token ids"

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 2:
            raise ConfigError(f"vocab size {vocab_size}: must be at least 2")
        self._low, self._high = vocab_size // 4, vocab_size

    def make(self, rng: np.random.Generator, num_tokens: int) -> list[int]:
        ids: list[int] = rng.integers(self._low, self._high, num_tokens).tolist()
        return ids


class ApproximateWords:
    """Common English words, each counted as one token, which most vocabularies nearly bear out."""

    exactness = "approximate: common words, one counted as one token; --tokenizer makes them exact"

    def __init__(self) -> None:
        self._words = COMMON_WORDS.split()

    def make(self, rng: np.random.Generator, num_tokens: int) -> str:
        return " ".join(rng.choice(self._words, num_tokens).tolist())


class FittedWords:
    """Words that are one token each for a given tokenizer, fitted until the whole has the exact length.

    Exact for the text itself; a chat template and a beginning-of-sequence token come on top of it.
    """

    exactness = "exact: words fitted with the tokenizer (template and special tokens not counted)"

    def __init__(self, path: Path) -> None:
        self._tokenizer = _load_tokenizer(path)
        self._words = self._stable_words()

    def make(self, rng: np.random.Generator, num_tokens: int) -> str:
        """Raises `ConfigError` where the tokenizer allows no text of that length."""
        words: list[str] = rng.choice(self._words, num_tokens).tolist()
        for _ in range(MAX_FITTING_ROUNDS):
            surplus = self._count(" ".join(words)) - num_tokens
            if surplus == 0:
                return " ".join(words)
            words = words[:-surplus] if surplus > 0 else [*words, *rng.choice(self._words, -surplus).tolist()]
        raise ConfigError(f"no text of exactly {num_tokens} tokens found with this tokenizer")

    def _count(self, text: str) -> int:
        return len(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def _stable_words(self) -> list[str]:
        """Words that add exactly one token after another word."""
        alone = self._count("the")
        candidates = dict.fromkeys(
            word
            for token_id in range(self._tokenizer.get_vocab_size())
            if len(word := self._tokenizer.decode([token_id]).strip()) > 1 and word.isascii() and word.isalpha()
        )
        stable: list[str] = []
        for word in candidates:
            if self._count(f"the {word}") == alone + 1:
                stable.append(word)
            if len(stable) == NUM_STABLE_WORDS:
                break
        if not stable:
            raise ConfigError("this tokenizer has no word that is one token; leave --tokenizer out")
        return stable


def _load_tokenizer(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        raise ConfigError("--tokenizer needs the tokenizers package: pip install tokenizers") from None
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"--tokenizer {path}: no such file")
    return Tokenizer.from_file(str(file))
