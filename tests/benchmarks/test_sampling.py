import pytest

from benchmarks import sampling


def test_every_way_of_sampling_is_measured_for_every_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "VOCABULARIES", (1500,))
    figures = sampling.measure(num_repeats=2, num_steps=1)
    assert [figure.subject for figure in figures] == ["greedy", *sampling.SAMPLINGS] * 2
    assert all(len(figure.samples) == 2 for figure in figures)
    assert all(figure.median > 0 for figure in figures if figure.subject == "greedy")


def test_the_promised_figure_is_one_of_those_measured() -> None:
    for vocab_size, shape, name in sampling.TARGET_MS:
        assert vocab_size in sampling.VOCABULARIES
        assert shape in ("peaked", "flat")
        assert name in sampling.SAMPLINGS
