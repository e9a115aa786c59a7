"""All the questions, in the order in which they are asked."""

from collections import Counter
from collections.abc import Iterator

from tests.triton.exam import (
    calls,
    description,
    encoded,
    faults,
    generating,
    inference,
    malformed,
    repository,
    stateful,
)
from tests.triton.records import Exchange

_TOPICS = (description, inference, malformed, encoded, generating, calls, faults, stateful, repository)


def questions() -> Iterator[Exchange]:
    """Every name is unique, so that a failure points at one question."""
    names: Counter[str] = Counter()
    for topic in _TOPICS:
        for question in topic.questions():
            names[question.name] += 1
            if names[question.name] > 1:
                raise ValueError(f"two questions are named {question.name}")
            yield question
