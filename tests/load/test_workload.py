from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from load.config import ApiKind, Arrival, LoadConfigError, RequestPace, TokenRange, Workload
from load.stream import PlannedRequest
from load.workload import (
    WARMUP_STREAM,
    ApproximateWords,
    FittedWords,
    TokenIds,
    arrival_offsets,
    planned_requests,
    prompt_source,
    requests_for,
)
from tests.paths import RILL_TOKENIZER


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
    source = prompt_source(ApiKind.CHAT, Workload())
    assert isinstance(source, ApproximateWords)
    assert "approximate" in source.exactness
    assert len(source.make(rng(), 12).split()) == 12


def test_completions_need_no_tokenizer() -> None:
    assert isinstance(prompt_source(ApiKind.COMPLETIONS, Workload()), TokenIds)
    assert isinstance(prompt_source(ApiKind.COMPLETIONS, Workload(tokenizer=RILL_TOKENIZER)), FittedWords)


def test_a_missing_tokenizer_is_a_settings_error() -> None:
    with pytest.raises(LoadConfigError, match="no such file"):
        FittedWords(Path("nowhere.json"))


WORKLOAD = Workload(TokenRange(32, 256), TokenRange(64, 192), seed=3)


def plan(count: int, workload: Workload = WORKLOAD, **stream: int) -> list[PlannedRequest]:
    return list(islice(planned_requests(workload, TokenIds(100), **stream), count))


def test_the_seed_alone_decides() -> None:
    assert plan(20) == plan(20)
    assert plan(20) != plan(20, Workload(TokenRange(32, 256), TokenRange(64, 192), seed=4))


def test_warmup_asks_other_prompts_than_the_run() -> None:
    assert not {str(r.prompt) for r in plan(10)} & {str(r.prompt) for r in plan(10, stream=WARMUP_STREAM)}


def test_lengths_fill_their_ranges_and_prompts_have_them() -> None:
    requests = plan(2000)
    assert {r.prompt_tokens for r in requests} == set(range(32, 257))
    assert {r.output_tokens for r in requests} == set(range(64, 193))
    assert all(len(r.prompt) == r.prompt_tokens for r in requests)


def test_a_number_of_requests_ends_the_plan() -> None:
    requests = planned_requests(WORKLOAD, TokenIds(100))
    assert [r.index for r in requests_for(RequestPace(concurrency=1, num_requests=3), requests)] == [0, 1, 2]


def test_constant_arrivals() -> None:
    assert list(islice(arrival_offsets(4.0, Arrival.CONSTANT, 0), 3)) == [0.0, 0.25, 0.5]


def test_poisson_arrivals_have_the_rate_and_exponential_gaps() -> None:
    gaps = np.diff(list(islice(arrival_offsets(4.0, Arrival.POISSON, 0), 20_001)))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(0.25, rel=0.03)
