"""The benchmark of prefill replicas."""

from pathlib import Path

import pytest

from benchmarks import prefill_split
from sluice.bundled import BUNDLED_MODEL, models_folder


def test_it_measures_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"STREAM_TOKENS": 20, "LONG_TOKENS": 300, "LONG_EVERY_S": 0.05, "NUM_LONG": 2}
    for name, value in small.items():
        monkeypatch.setattr(prefill_split, name, value)
    lines: list[str] = []
    figures = prefill_split.measure(1, tmp_path, models_folder() / BUNDLED_MODEL / "1", lines.append)
    assert len(lines) == len(prefill_split.SUBJECTS)
    handed_over = [each.samples for each in figures if each.name == "prompts handed over"]
    assert handed_over == [(0.0,), (2.0,)]
