from benchmarks import sampling


def test_the_promised_figure_is_one_of_those_measured() -> None:
    for vocab_size, shape, name in sampling.TARGET_MS:
        assert vocab_size in sampling.VOCABULARIES
        assert shape in ("peaked", "flat")
        assert name in sampling.SAMPLINGS
