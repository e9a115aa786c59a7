"""`make soak`, in its short form: a real fleet under traffic and every kind of fault."""

import json
from pathlib import Path

import pytest

from sluice.load.chaos.__main__ import main
from sluice.load.chaos.faults import FAULTS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_no_promise_breaks_under_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    minutes = ("--minutes", "0.9", "--gap", "2.6", "--clients", "8", "--seed", "23")
    status = main([*minutes, "--folder", str(tmp_path / "fleet"), "--json", str(report)])
    shown = capsys.readouterr().out
    found = json.loads(report.read_text())
    assert (status, found["violations"]) == (0, []), shown
    assert sum(found["faults"].values()) >= len(FAULTS) - 5, shown
    assert found["requests"]["completed"] > 60, shown
    assert found["requests"]["lost"] == 0
    assert len(found["samples"]) >= 8
    assert all(each["processes"] and each["gauges"] for each in found["samples"][:1])
    assert found["skipped"].keys() <= {"clocks"}, "whose library need not be there"
