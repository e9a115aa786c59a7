from typing import Any

import pytest

from engine import validation
from engine.types import SamplingParams
from pipelines.text.runtime_fields import RUNTIME_FIELDS, wanted_of_runtime
from pipelines.text.types import SamplingOverrides

ALL = tuple(RUNTIME_FIELDS)


def wanted(sent: dict[str, Any], has: tuple[str, ...]) -> dict[str, Any]:
    """What is left of `sent`."""
    left = wanted_of_runtime(SamplingOverrides(max_tokens=5, **sent), has)
    assert left.max_tokens == 5
    return {name: value for name in ALL if (value := getattr(left, name)) is not None}


def test_they_are_sampling_parameters() -> None:
    assert set(ALL) <= set(SamplingParams.__struct_fields__)
    assert set(ALL) <= set(SamplingOverrides.__struct_fields__)


@pytest.mark.parametrize("has", [(), ALL])
@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_search_diversity_rate", 0.0), ("no_repeat_ngram_size", 0), ("top_p_min", 0.0), ("top_p_decay", 1.0)],
)
def test_what_is_off_is_never_asked_for(name: str, value: float, has: tuple[str, ...]) -> None:
    assert wanted({name: value}, has) == {}


@pytest.mark.parametrize(
    "sent",
    [
        {"beam_width": 1},
        {"length_penalty": 1.0},
        {"length_penalty": 0.0},
        {"early_stopping": 1},
        {"top_p_reset_ids": 7},
    ],
)
def test_what_changes_nothing_is_kept_only_where_the_field_is(sent: dict[str, float]) -> None:
    assert wanted(sent, ()) == {}
    assert wanted(sent, ALL) == sent


@pytest.mark.parametrize("has", [(), ALL])
@pytest.mark.parametrize(
    "sent", [{"beam_width": 2}, {"length_penalty": 2.0}, {"top_p_min": 0.1}, {"no_repeat_ngram_size": 3}]
)
def test_what_asks_for_something_is_kept_for_the_engine_to_judge(sent: dict[str, float], has: tuple[str, ...]) -> None:
    assert wanted(sent, has) == sent


def test_the_engine_knows_the_same_fields() -> None:
    assert set(ALL) == set(validation.RUNTIME_FIELDS)
