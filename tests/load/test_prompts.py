from pathlib import Path

import numpy as np
import pytest

from load.config import Api, ConfigError, Workload
from load.prompts import ApproximateWords, FittedWords, TokenIds, prompt_source
from tests.paths import RILL_TOKENIZER

tokenizers = pytest.importorskip("tokenizers")


def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_token_ids_are_exact_and_keep_clear_of_special_tokens() -> None:
    ids = TokenIds(400).make(rng(), 5000)
    assert len(ids) == 5000
    assert (min(ids), max(ids)) == (100, 399)


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 64, 257])
def test_fitted_words_have_exactly_the_tokens_asked_for(num_tokens: int) -> None:
    text = FittedWords(RILL_TOKENIZER).make(rng(), num_tokens)
    counter = tokenizers.Tokenizer.from_file(str(RILL_TOKENIZER / "tokenizer.json"))
    assert len(counter.encode(text, add_special_tokens=False).ids) == num_tokens


def test_fitted_words_vary() -> None:
    prompts, random = FittedWords(RILL_TOKENIZER), rng()
    assert prompts.make(random, 32) != prompts.make(random, 32)


def test_approximate_words_say_so() -> None:
    source = prompt_source(Api.CHAT, Workload())
    assert isinstance(source, ApproximateWords)
    assert "approximate" in source.exactness
    assert len(source.make(rng(), 12).split()) == 12


def test_completions_need_no_tokenizer() -> None:
    assert isinstance(prompt_source(Api.COMPLETIONS, Workload()), TokenIds)
    assert isinstance(prompt_source(Api.COMPLETIONS, Workload(tokenizer=RILL_TOKENIZER)), FittedWords)


def test_a_missing_tokenizer_is_a_settings_error() -> None:
    with pytest.raises(ConfigError, match="no such file"):
        FittedWords(Path("nowhere.json"))
