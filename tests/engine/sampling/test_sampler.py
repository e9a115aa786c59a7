"""`sample` apart from drawing: greedy, edits, bans, constraints, log probabilities, failures."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from sluice.engine.arrays import IntArray
from sluice.engine.guidance.matching import FewAllowed
from sluice.engine.runners.base import TokenMask
from sluice.engine.sampling.sampler import NO_TOKEN
from sluice.engine.sampling.state import SamplingState, TokenCounts
from sluice.engine.types import SamplingParams, ThinkingBudget, TokenLogprob
from sluice.errors import ErrorCode, SluiceError
from tests.engine.sampling.host import prompt_logprobs, sample

VOCAB = 50

Logits = NDArray[np.float32]


class OnlyThese:
    """A constraint to one sentence: its tokens, one after the other. It is its own mask."""

    def __init__(self, *sentence: int) -> None:
        self.left = list(sentence)
        self.seen_by_apply: list[float] = []

    def prepare(self) -> None:
        """Do nothing."""

    def mask(self) -> "OnlyThese":
        return self

    def apply(self, row: Logits) -> None:
        kept = float(row[self.left[0]])
        self.seen_by_apply.append(kept)
        row[:] = -np.inf
        row[self.left[0]] = kept

    def pack(self, vocab_size: int) -> IntArray:
        return FewAllowed(np.array(self.left[:1])).pack(vocab_size)

    def accept(self, token_id: int) -> None:
        assert token_id == self.left.pop(0)


def state(
    prompt: tuple[int, ...] = (),
    stop: frozenset[int] = frozenset(),
    output: tuple[int, ...] = (),
    constraint: OnlyThese | None = None,
    **fields: Any,
) -> SamplingState:
    params = SamplingParams(**{"max_tokens": 100, "temperature": 0.0, **fields})
    return SamplingState(params, list(prompt), stop, VOCAB, output, constraint)


def row(**logits: float) -> Logits:
    """Return one row of logits: t3=2.0 sets token 3, all others are 0."""
    values = np.zeros((1, VOCAB), np.float32)
    for name, value in logits.items():
        values[0, int(name[1:])] = value
    return values


def chosen(logits: Logits, one: SamplingState) -> int:
    return int(sample(logits, [one]).token_ids[0])


def test_greedy_takes_the_largest_and_the_first_of_equals() -> None:
    logits = np.random.default_rng(0).normal(size=(8, VOCAB)).astype(np.float32)
    logits[3, [9, 4]] = 8.0
    tokens = sample(logits, [state() for _ in range(8)]).token_ids.tolist()
    assert tokens == logits.argmax(axis=1).tolist()
    assert tokens[3] == 4


# -- edits


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e39, 1e308])
def test_a_penalty_beyond_float32_makes_no_logit_infinite(penalty: float) -> None:
    one = state(prompt=(3, 4, 6), repetition_penalty=penalty)
    logits = row(t3=30.0, t5=2.0)
    logits[0, 4] = -30.0
    assert chosen(logits, one) == (5 if penalty > 1 else 3)


def test_bias_is_added_before_penalties() -> None:
    assert chosen(row(t3=2.0), state(logit_bias={5: 2.5, 3: 0.1})) == 5
    assert chosen(row(t3=2.0), state(logit_bias={3: -100.0, 4: -100.0})) == 0
    one = state(prompt=(5,), repetition_penalty=2.0, logit_bias={5: 3.0})
    assert chosen(row(t3=1.6), one) == 3, "(0 + 3) / 2 < 1.6"


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_edits_of_many_rows_are_the_formulas_of_transformers_token_by_token(seed: int, num_rows: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (num_rows, VOCAB)).astype(np.float32)
    states, expected = [], logits.astype(np.float64)
    for values in expected:
        prompt, output = rng.integers(0, VOCAB, 5).tolist(), rng.integers(0, 6, 7).tolist()
        is_narrow = bool(rng.random() < 0.5)
        params = SamplingParams(
            temperature=0.0,
            repetition_penalty=float(rng.choice([0.6, 1.0, 1.7])),
            presence_penalty=float(rng.choice([0.0, 1.1])),
            frequency_penalty=float(rng.choice([0.0, 0.7])),
            logit_bias={int(rng.integers(VOCAB)): 1.5} if rng.random() < 0.5 else {},
            allowed_token_ids=tuple(rng.integers(0, VOCAB, 3).tolist()) if is_narrow else (),
            bad_words=() if is_narrow else tuple((int(each),) for each in rng.integers(0, VOCAB, 20)),
        )
        states.append(SamplingState(params, prompt, frozenset(), VOCAB, output))
        _edit(values, params, prompt, output)
    assert sample(logits, states).token_ids.tolist() == expected.argmax(axis=1).tolist()
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-5)


def _edit(values: NDArray[np.float64], params: SamplingParams, prompt: list[int], output: list[int]) -> None:
    """Presence and frequency count the output alone, repetition the prompt too. A bias is added before."""
    for token_id in range(VOCAB):
        values[token_id] += params.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            factor = params.repetition_penalty
            values[token_id] = values[token_id] / factor if values[token_id] > 0 else values[token_id] * factor
        if count := output.count(token_id):
            values[token_id] -= params.presence_penalty + params.frequency_penalty * count
        if token_id not in (params.allowed_token_ids or range(VOCAB)) or (token_id,) in params.bad_words:
            values[token_id] = -np.inf


@given(st.lists(st.integers(0, 300), max_size=200))
def test_counts_are_right_as_they_grow(token_ids: list[int]) -> None:
    counts = TokenCounts(token_ids)
    expected = {token_id: token_ids.count(token_id) for token_id in token_ids}
    assert dict(zip(counts.ids.tolist(), counts.counts.tolist(), strict=True)) == expected


def test_states_that_share_a_row_do_not_edit_each_other() -> None:
    logits = np.concatenate([row(), row(t3=2.0, t5=1.0)])
    biased = state(logit_bias={5: 5.0}, logprobs=0)
    samples = sample(logits, [state(logprobs=0), biased, state(temperature=0.0)], np.array([1, 1, 1]))
    assert samples.token_ids.tolist() == [3, 5, 3]
    assert samples.logprobs is not None
    assert samples.logprobs[2] is None


# -- bans


def test_min_tokens_holds_the_end_back() -> None:
    one = state(stop=frozenset({7, 999}), min_tokens=2)
    logits = row(t7=9.0, t5=1.0)
    assert chosen(logits.copy(), one) == 5
    one.observe(5)
    one.observe(5)
    assert chosen(logits.copy(), one) == 7


def test_bad_words_are_not_completed_but_may_be_begun() -> None:
    one = state(prompt=(1, 2), bad_words=((1, 2, 3), (3, 4), (9, 3, 5)))
    logits = row(t3=5.0, t4=4.0, t5=3.0)
    assert chosen(logits.copy(), one) == 4, "the prompt had begun 1 2 3"
    one.observe(9)
    assert chosen(logits.copy(), one) == 3
    one.observe(3)
    assert chosen(row(t3=1.0, t4=4.0, t5=3.0), one) == 3, "3 4 and 9 3 5 are both begun"
    one.observe(0)
    assert chosen(row(t4=4.0), one) == 4
    assert not one.edits_logits


@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=6),
    st.lists(st.integers(0, 3), max_size=4),
    st.lists(st.integers(0, 3), max_size=8),
)
def test_bans_are_those_of_a_plain_search(words: list[tuple[int, ...]], prompt: list[int], output: list[int]) -> None:
    one = state(prompt=tuple(prompt), output=tuple(output), bad_words=tuple(words))
    context = [*prompt, *output]
    begun = {word[-1] for word in words if len(word) == 1 or tuple(context[-len(word) + 1 :]) == word[:-1]}
    assert set(one.banned.tolist()) == begun


# -- constraints


def test_a_constraint_sees_edited_logits_and_is_told_what_came() -> None:
    grammar = OnlyThese(4, 6)
    one = state(constraint=grammar, logit_bias={4: -3.0}, temperature=1.0, top_p=0.5, logprobs=1)
    samples = sample(row(t4=1.0, t9=30.0), [one])
    assert samples.token_ids.tolist() == [4]
    assert grammar.seen_by_apply == [-2.0]
    assert samples.logprobs is not None
    assert samples.logprobs[0] is not None
    assert samples.logprobs[0].top[0][0] == 9, "log probabilities are the model's"
    one.observe(4)
    assert chosen(row(t9=30.0), one) == 6


# -- a budget for the reasoning: it opens with 1, and closes with 8 and 9


@pytest.mark.parametrize(
    ("prompt", "output", "expected"),
    [
        ((3,), (), 4),  # it has not begun
        ((1, 3), (3,), 8),
        ((1,), (3,), 4),
        ((1, 3, 8, 9), (3, 3, 3), 4),
        ((1, 3, 8, 9, 1), (3, 3), 8),
        ((3,), (3, 1, 3, 3), 8),
        ((1,), (3, 3, 8), 9),
        ((1,), (3, 3, 8, 9), 4),
        ((1,), (3, 8), 4),  # begun in time, it may still go on
        ((1,), (3, 8, 3), 8),
        ((1,), (3, 8, 3, 8), 9),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_reasoning_is_closed_where_its_budget_is_spent(
    prompt: tuple[int, ...], output: tuple[int, ...], expected: int, temperature: float
) -> None:
    budget = ThinkingBudget(2, (1,), (8, 9))
    one = state(prompt=prompt, output=output, thinking_token_budget=budget, temperature=temperature)
    assert chosen(row(t4=40.0), one) == expected


def test_a_constraint_says_where_the_reasoning_can_be_closed() -> None:
    one = state(prompt=(1, 3), constraint=OnlyThese(6, 8), thinking_token_budget=ThinkingBudget(1, (1,), (8,)))
    for expected in (6, 8):
        assert chosen(row(t4=40.0), one) == expected
        one.observe(expected)


# -- resuming


FIELDS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"bad_words": ((1, 2), (3,)), "min_tokens": 6},
    {"top_p": 0.9, "logit_bias": {4: 2.0}},
    {"thinking_token_budget": ThinkingBudget(3, (1,), (2, 5))},
]


@pytest.mark.parametrize("fields", FIELDS)
@settings(max_examples=25)
@given(st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_a_resumed_sequence_goes_on_as_if_never_interrupted(fields: dict[str, Any], seed: int, cut: int) -> None:
    steps = np.random.default_rng(7).normal(0, 2, (10, 1, VOCAB)).astype(np.float32)
    how = {"temperature": 0.9, "seed": seed, **fields}

    def go_on(one: SamplingState, steps: Logits) -> list[int]:
        tokens = []
        for logits in steps:
            tokens.append(chosen(logits.copy(), one))
            one.observe(tokens[-1])
        return tokens

    whole = go_on(state(prompt=(1,), stop=frozenset({0}), **how), steps)
    resumed = state(prompt=(1,), stop=frozenset({0}), output=tuple(whole[:cut]), **how)
    assert go_on(resumed, steps[cut:]) == whole[cut:]


def test_a_resumed_constraint_is_told_what_had_come() -> None:
    grammar = OnlyThese(4, 6)
    assert chosen(row(t9=30.0), state(output=(4,), constraint=grammar)) == 6


def test_without_a_seed_every_sequence_has_its_own() -> None:
    states = [state(temperature=1.0) for _ in range(300)]
    assert len(set(sample(np.zeros((300, VOCAB), np.float32), states).token_ids.tolist())) > 30


# -- log probabilities


def reference(values: Logits, token_id: int, num_top: int) -> TokenLogprob:
    exact = values.astype(np.float64)
    logprobs = exact - exact.max() - np.log(np.exp(exact - exact.max()).sum())
    best = np.argsort(-logprobs, kind="stable")[:num_top].tolist()
    return TokenLogprob(token_id, float(logprobs[token_id]), [(i, float(logprobs[i])) for i in best])


def assert_close(found: TokenLogprob | None, expected: TokenLogprob) -> None:
    assert found is not None
    assert found.token_id == expected.token_id
    assert found.logprob == pytest.approx(expected.logprob, abs=2e-5)
    assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in expected.top]
    assert [value for _, value in found.top] == pytest.approx([value for _, value in expected.top], abs=2e-5)


@pytest.mark.parametrize("vocab_size", [7, 900, 5003])
@pytest.mark.parametrize("is_rounded", [False, True])
def test_log_probabilities_are_the_models_own(vocab_size: int, is_rounded: bool) -> None:
    logits = np.random.default_rng(vocab_size).normal(0, 3, (4, vocab_size)).astype(np.float32)
    logits = np.round(logits) if is_rounded else logits
    wanted: list[dict[str, Any]] = [
        {"logprobs": 20, "temperature": 0.0},
        {"logprobs": None, "temperature": 1.0},
        {"logprobs": 3, "temperature": 0.3, "top_k": 5, "logit_bias": {2: 9.0}, "bad_words": ((0,),)},
        {"logprobs": 0, "temperature": 2.0},
    ]
    states = [SamplingState(SamplingParams(seed=5, **fields), [1], frozenset(), vocab_size) for fields in wanted]
    samples = sample(logits.copy(), states)
    assert samples.logprobs is not None
    assert samples.logprobs[1] is None
    for index, num_top in ((0, 20), (2, 3), (3, 0)):
        token_id = int(samples.token_ids[index])
        assert_close(samples.logprobs[index], reference(logits[index], token_id, min(num_top, vocab_size)))


def test_log_probabilities_of_a_prompt() -> None:
    logits = np.random.default_rng(1).normal(0, 3, (5, 3000)).astype(np.float32)
    token_ids = np.array([5, 2999, 0, 17, 17], np.int32)
    found = prompt_logprobs(logits, token_ids, 4)
    assert len(found) == 5
    for values, token_id, entry in zip(logits, token_ids.tolist(), found, strict=True):
        assert_close(entry, reference(values, token_id, 4))
    assert prompt_logprobs(logits[:0], token_ids[:0], 4) == []


# -- failures


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9, "logprobs": 2}])
def test_logits_that_are_no_numbers_fail_their_own_state_alone(value: float, fields: dict[str, Any]) -> None:
    logits = np.concatenate([row(t3=40.0), row(t3=40.0), row(t3=40.0)])
    logits[1, 6] = value
    samples = sample(logits, [state(**fields) for _ in range(3)])
    assert samples.token_ids.tolist() == [3, NO_TOKEN, 3]
    assert samples.failed.keys() == {1}
    assert samples.failed[1].code is ErrorCode.INTERNAL
    if samples.logprobs is not None:
        assert [entry is None for entry in samples.logprobs] == [False, True, False]


def test_when_nothing_may_come_next_it_says_so() -> None:
    logits = np.concatenate([row(t3=1.0), row(t3=1.0)])
    banning = state(constraint=OnlyThese(4), bad_words=((4,),), temperature=1.0)
    samples = sample(logits, [banning, state()])
    assert samples.token_ids.tolist() == [NO_TOKEN, 3]
    assert (samples.failed[0].code, samples.failed[0].param) == (ErrorCode.INVALID, "grammar")
    assert "bad_words" in samples.failed[0].message
    alone = sample(row(t3=1.0), [state(allowed_token_ids=(4,), bad_words=((4,),))])
    assert (alone.failed[0].code, alone.failed[0].param) == (ErrorCode.INVALID, None)


class Unmet:
    """A constraint that fails."""

    def prepare(self) -> None: ...

    def mask(self) -> TokenMask:
        raise SluiceError(ErrorCode.INVALID, "the grammar is too complex")

    def accept(self, token_id: int) -> None: ...


def test_a_constraint_that_fails_takes_only_its_own_sequence_along() -> None:
    logits = np.zeros((3, 8), np.float32)
    logits[:, 5] = 1.0
    params = SamplingParams(temperature=0.0)
    states = [SamplingState(params, [1], frozenset(), 8, (), Unmet() if i == 1 else None) for i in range(3)]
    samples = sample(logits, states)
    assert samples.token_ids.tolist() == [5, -1, 5]
    assert {i: error.message for i, error in samples.failed.items()} == {1: "the grammar is too complex"}
