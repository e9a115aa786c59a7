from pathlib import Path

import pytest

from benchmarks import kv_tiers
from sluice.bundled import BUNDLED_MODEL, models_folder


def test_every_subject_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"NUM_USERS": 3, "NUM_TURNS": 2, "DOCUMENT_TOKENS": 80, "ANSWER_TOKENS": 4}.items():
        monkeypatch.setattr(kv_tiers, name, value)
    lines: list[str] = []
    figures = kv_tiers.measure(1, tmp_path, models_folder() / BUNDLED_MODEL / "1", lines.append)
    assert len(lines) == len(kv_tiers.SUBJECTS)
    assert [figure.subject for figure in figures if figure.name == "TTFT of a later turn"] == list(kv_tiers.SUBJECTS)
    assert all(figure.median > 0 for figure in figures if figure.unit in ("ms", "tok/s") and "TTFT" in figure.name)
