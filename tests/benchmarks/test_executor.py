from benchmarks.executor import RUNNING, SAMPLINGS, measure


def test_every_sequence_steps_with_the_null_runner() -> None:
    """The benchmark itself checks that each sequence got a token in each timed step."""
    figures = measure(num_repeats=1, num_steps=3)
    assert len(figures) == len(RUNNING) * len(SAMPLINGS) + 1, "and one of a crowd"
    assert all(figure.median > 0 for figure in figures)
