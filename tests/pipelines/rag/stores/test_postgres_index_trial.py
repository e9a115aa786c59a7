"""Decisions whether an index is trusted."""

from pipelines.rag.stores.postgres.index_trial import IndexTrial, IndexTrials
from pipelines.rag.types import CollectionInfo, CollectionSpec

RIGHT = range(10)


def asked(trial: IndexTrial, *found: int) -> None:
    """Record as many questions as a decision takes. The index found these numbers of ten chunks, in turn."""
    for number in range(16):
        trial.record(range(found[number % len(found)]), RIGHT)


def test_an_index_that_finds_enough_is_trusted() -> None:
    trial = IndexTrial(100_000, 200)
    for _ in range(15):
        trial.record(RIGHT, RIGHT)
    assert not trial.is_decided
    trial.record(RIGHT, RIGHT)
    assert (trial.is_decided, trial.ef_search) == (True, 200)
    asked(trial, 0)
    assert (trial.is_decided, trial.ef_search) == (True, 200)


def test_an_index_that_finds_too_few_is_tried_with_a_greater_ef_search() -> None:
    trial = IndexTrial(100_000, 200)
    asked(trial, 9, 10)
    assert (trial.is_decided, trial.ef_search) == (False, 500)
    asked(trial, 10)
    assert (trial.is_decided, trial.ef_search) == (True, 500)


def test_an_index_that_never_finds_enough_is_given_up() -> None:
    trial = IndexTrial(100_000, 200)
    for ef_search in (500, 1000, None):
        asked(trial, 5)
        assert trial.ef_search == ef_search
    assert trial.is_decided


def test_questions_without_hits_do_not_count() -> None:
    trial = IndexTrial(100_000, 200)
    for _ in range(100):
        trial.record((), ())
    assert not trial.is_decided


def test_an_index_of_a_huge_collection_is_trusted_without_a_trial() -> None:
    assert IndexTrial(1_000_001, 200).is_decided


def test_a_collection_that_has_grown_is_tried_again() -> None:
    trials = IndexTrials(200)

    def info(num_chunks: int) -> CollectionInfo:
        return CollectionInfo(CollectionSpec("docs", "encoder", 384), 1, num_chunks, 0.0)

    first = trials.find(1, info(20_000))
    assert trials.find(1, info(40_000)) is first
    assert trials.find(2, info(20_000)) is not first
    again = trials.find(1, info(40_001))
    assert again is not first
    assert trials.find(1, info(10_000)) is again
