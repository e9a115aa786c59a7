import pytest

from benchmarks.rag import stores


def test_a_small_store_finds_all_that_numpy_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The insertion is repeated into a new collection."""
    monkeypatch.setattr(stores, "NUM_CHUNKS", 400)
    monkeypatch.setattr(stores, "NUM_QUERIES", 10)
    monkeypatch.setattr(stores, "DIM", 16)
    figures = {(figure.name, figure.subject): figure for figure in stores.measure(2, lambda line: None)}
    recalls = [figure for (name, _), figure in figures.items() if name.startswith("recall@10")]
    assert len(recalls) == 2
    assert all(figure.target is not None and figure.target.is_met_by(figure.median) for figure in recalls)
    assert len(figures["documents of 10 chunks put one by one", "SQLite"].samples) == 2
    assert figures["vector search, median", "numpy"].median > 0
