"""The training examples of rill follow the answer rule."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.rill.conversation import Conversation
from training.rill.pairs_rag import invented_example, mentions, phrase_example
from training.rill.persona import NOT_IN_CONTEXT
from training.rill.schedule import PHASES, phase_at, rate_scale
from training.rill.text import sentences

PROSE = [
    "The cache holds blocks of equal size. A block is free while nobody refers to it! Is it reclaimed? "
    "The oldest one is, e.g. when a new request needs room.",
]


def check_answer_rule(conversation: Conversation) -> None:
    """Check that every answer stands word for word in the context: in the first question or the system message."""
    context = conversation.system + conversation.turns[0][0]
    for _, answer in conversation.turns:
        assert answer == NOT_IN_CONTEXT or answer in context


@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 3))
def test_invented_facts_are_quoted_or_declined(seed: int, count: int, turns: int) -> None:
    conversation = invented_example(Random(seed), count, turns)
    if conversation is not None:
        check_answer_rule(conversation)


def test_some_questions_cannot_be_answered_and_most_can() -> None:
    made = [invented_example(Random(seed), 3) for seed in range(400)]
    answers = [conversation.turns[0][1] for conversation in made if conversation is not None]
    assert 0.1 < answers.count(NOT_IN_CONTEXT) / len(answers) < 0.5


@given(st.integers(0, 10**6))
def test_phrases_are_answered_by_the_sentence_that_holds_them(seed: int) -> None:
    conversation = phrase_example(PROSE, Random(seed))
    if conversation is not None:
        check_answer_rule(conversation)


def test_sentences_end_where_a_reader_would_end_them() -> None:
    [prose] = PROSE
    assert len(sentences(prose)) == 4
    assert " ".join(sentences(prose)) == prose


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [("Use os.path.join here.", "os.path.join", True), ("Use os.path.joined here.", "os.path.join", False)],
)
def test_a_name_is_mentioned_only_as_a_whole(text: str, name: str, expected: bool) -> None:
    assert mentions(text, name) is expected


def test_phases_follow_each_other_and_the_rate_falls() -> None:
    numbers = [phase_at(progress / 100) for progress in range(101)]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(len(PHASES)))
    rates = [rate_scale(1000, progress / 100) for progress in range(101)]
    assert rates == sorted(rates, reverse=True)
    assert rate_scale(0, 0.0) < rate_scale(30, 0.0) == 1.0
