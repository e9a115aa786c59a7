import pytest

from benchmarks.experts import FORMS, NUM_TOKENS, Shape, measure


@pytest.mark.slow
def test_each_form_is_measured_for_each_number_of_tokens() -> None:
    figures = measure(2, (Shape(4, 2, 64, 32),), ("none",))
    assert [figure.subject for figure in figures] == [
        f"{form}, {count} tokens" for form in FORMS for count in NUM_TOKENS
    ]
    assert {figure.name for figure in figures} == {"4 experts of 64 x 32, 2 chosen, none"}
    assert all(len(figure.samples) == 2 and min(figure.samples) > 0 for figure in figures)
