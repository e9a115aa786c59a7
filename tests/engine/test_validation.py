import math

import pytest

from engine.errors import ErrorCode, SluiceError
from engine.types import SamplingParams
from engine.validation import check_sampling


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("temperature", -0.1, "between 0 and 2"),
        ("temperature", 2.5, "between 0 and 2"),
        ("temperature", math.nan, "between 0 and 2"),
        ("top_p", 0.0, "greater than 0 and at most 1"),
        ("top_p", 1.5, "greater than 0 and at most 1"),
        ("top_k", -1, "0 (off) or more"),
        ("min_p", -0.5, "between 0 and 1"),
        ("presence_penalty", 3.0, "between -2 and 2"),
        ("frequency_penalty", -3.0, "between -2 and 2"),
        ("repetition_penalty", 0.0, "greater than 0"),
        ("repetition_penalty", math.inf, "greater than 0"),
        ("max_tokens", 0, "1 or more"),
        ("max_tokens", -5, "1 or more"),
        ("min_tokens", -1, "between 0 and max_tokens (16)"),
        ("min_tokens", 17, "between 0 and max_tokens (16)"),
        ("seed", -1, "between 0 and 18446744073709551615"),
        ("stop_token_ids", (3, -2), "0 or more"),
    ],
)
def test_out_of_range_names_field_value_and_range(field: str, value: object, allowed: str) -> None:
    with pytest.raises(SluiceError) as caught:
        check_sampling(SamplingParams(**{field: value}))  # type: ignore[arg-type]
    shown = value[-1] if isinstance(value, tuple) else value
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == field
    assert caught.value.message == f"{field} must be {allowed}, got {shown}"


def test_the_edges_are_allowed() -> None:
    check_sampling(SamplingParams(temperature=0, top_p=1, top_k=0, min_p=1, seed=2**64 - 1, max_tokens=1, min_tokens=1))
    check_sampling(SamplingParams(temperature=2, top_p=0.01, presence_penalty=-2, frequency_penalty=2))
