from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from sluice.load.config import ApiKind, Arrival, LoadConfigError, RequestPace, TokenRange, Workload
from sluice.load.stream import PlannedRequest
from sluice.load.workload import (
    REQUEST_STREAM,
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


def plan(count: int, workload: Workload = WORKLOAD, stream: int = REQUEST_STREAM) -> list[PlannedRequest]:
    return list(islice(planned_requests(workload, TokenIds(100), stream), count))


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


def offsets(num: int, **pace: Any) -> list[float]:
    return list(islice(arrival_offsets(RequestPace(num_requests=num, **pace), 0), num))


def test_constant_arrivals() -> None:
    assert offsets(3, request_rate=4.0, arrival=Arrival.CONSTANT) == [0.0, 0.25, 0.5]


@pytest.mark.parametrize(
    ("arrival", "burstiness", "deviation"),
    [(Arrival.POISSON, 1.0, 0.25), (Arrival.GAMMA, 1.0, 0.25), (Arrival.GAMMA, 0.25, 0.5), (Arrival.GAMMA, 4.0, 0.125)],
)
def test_gaps_have_the_rate_and_the_deviation(arrival: Arrival, burstiness: float, deviation: float) -> None:
    gaps = np.diff(offsets(20_001, request_rate=4.0, arrival=arrival, burstiness=burstiness))
    assert gaps.mean() == pytest.approx(0.25, rel=0.03)
    assert gaps.std() == pytest.approx(deviation, rel=0.05)


@pytest.mark.parametrize(("first", "last"), [(2.0, 20.0), (20.0, 2.0)])
def test_a_ramp_goes_evenly_from_its_first_rate_to_its_last(first: float, last: float) -> None:
    ramp = offsets(111, request_rate=first, final_rate=last, duration_s=10.0, arrival=Arrival.CONSTANT)
    assert ramp[-1] == pytest.approx(10.0)
    assert np.diff(ramp)[0] == pytest.approx(1 / first, rel=0.2)
    assert np.diff(ramp)[-1] == pytest.approx(1 / last, rel=0.2)


def test_a_ramp_that_ends_sends_no_more_than_its_area() -> None:
    pace = RequestPace(request_rate=10.0, final_rate=0.001, duration_s=2.0, arrival=Arrival.CONSTANT)
    assert len(list(arrival_offsets(pace, 0))) == 11


def test_a_ramp_needs_a_rate_and_a_duration() -> None:
    with pytest.raises(LoadConfigError, match="request_rate"):
        RequestPace(concurrency=1, num_requests=1, final_rate=2.0)


@pytest.mark.parametrize("source", [TokenIds(400), FittedWords(RILL_TOKENIZER)])
def test_prompts_share_their_prefix_and_nothing_else(source: TokenIds | FittedWords) -> None:
    workload = Workload(prompt_tokens=TokenRange(20, 30), prefix_tokens=12, num_prefixes=2)
    planned = list(islice(planned_requests(workload, source), 40))
    prompts = [each.prompt.split() if isinstance(each.prompt, str) else each.prompt for each in planned]
    if isinstance(source, TokenIds):
        assert all(len(prompt) == each.prompt_tokens for prompt, each in zip(prompts, planned, strict=True))
    assert len({tuple(prompt[:10]) for prompt in prompts}) == 2
    assert len({tuple(prompt) for prompt in prompts}) == 40


def test_a_prefix_is_shorter_than_the_shortest_prompt() -> None:
    with pytest.raises(LoadConfigError, match="below the shortest prompt"):
        Workload(prompt_tokens=TokenRange(20, 30), prefix_tokens=20)


def test_the_share_of_clients_that_leave_does_so_within_the_answer() -> None:
    workload = Workload(cancelled_share=0.25, output_tokens=TokenRange(8, 8))
    leaving = [each.leaves_after for each in islice(planned_requests(workload, TokenIds(400)), 2000)]
    left = [each for each in leaving if each is not None]
    assert len(left) == pytest.approx(500, rel=0.15)
    assert set(left) == set(range(1, 9))
