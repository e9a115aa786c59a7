from benchmarks import guidance


def test_every_figure_is_measured() -> None:
    figures = guidance.measure(num_repeats=2, num_steps=3, vocabularies=(1000,))
    assert len({(figure.name, figure.subject) for figure in figures}) == len(figures) == 5
    assert all(len(figure.samples) == 2 and min(figure.samples) > 0 for figure in figures)
