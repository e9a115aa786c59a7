"""The benchmark of prefill replicas."""

import pytest

from benchmarks import prefill_split


@pytest.mark.long
@pytest.mark.slow
def test_it_measures_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"STREAM_TOKENS": 20, "LONG_TOKENS": 300, "LONG_OUTPUT": 2, "LONG_EVERY_S": 0.05, "NUM_LONG": 2}
    for name, value in small.items():
        monkeypatch.setattr(prefill_split, name, value)
    lines: list[str] = []
    figures = prefill_split.measure(1, None, lines.append)
    assert len(lines) == len(prefill_split.SUBJECTS)
    handed_over = [each.samples for each in figures if each.name == "prompts handed over"]
    assert handed_over == [(0.0,), (2.0,)]
    assert figures[-1].samples == (2.0,), "the answers are the same"
