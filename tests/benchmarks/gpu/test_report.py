"""What a run has shown stands in docs/gpus.md, and nothing else does."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import report
from benchmarks.gpu.aims import judge

SUMMARY: dict[str, Any] = {
    "measured_at": "2027-01-02T03:04:05+00:00",
    "commit": "abc",
    "device": "cuda",
    "is_tiny": False,
    "parts": {
        "versions": {"figures": {"gpu": {"name": "NVIDIA X"}, "packages": {"torch": "2.11.0"}}, "seconds": 4.2},
        "kernels": {"figures": {}, "seconds": 9.0, "error": "ValueError: a | b"},
        "decoder": {
            "figures": {"decode 1 x 1024": {"of_limit": 0.8}, "prefill 2048": {"of_limit": 0.5}},
            "seconds": 70.6,
        },
        "executor": {"figures": {"8B under pressure": {"preemptions": 0}}, "seconds": 31.0},
        "metrics": {"figures": {}, "seconds": 0.2, "skipped": "nvidia-smi is not installed"},
    },
}


def test_aims_are_judged_by_the_measured_share() -> None:
    verdicts = {label: (value, verdict) for label, _, _, value, verdict, _ in judge(SUMMARY)}
    assert verdicts["8B decode 1 x 1,024"] == ("80%", "accepted")
    assert verdicts["8B prefill 2,048"] == ("50%", "missed")
    assert verdicts["8B decode 32 x 1,024"] == ("", "not measured")
    assert verdicts["preemptions"] == ("0", "met")


def test_small_shapes_have_no_aims() -> None:
    assert judge({**SUMMARY, "is_tiny": True}) == []


def test_the_section_says_what_ran_failed_and_did_not_run() -> None:
    text = report.section(SUMMARY)
    assert "2027-01-02, commit abc: NVIDIA X, driver unknown, torch 2.11.0." in text
    assert "| our Triton kernels against float64 | FAILED: ValueError: a \\| b | 9 |" in text
    assert "| GPU metrics against nvidia-smi | skipped: nvidia-smi is not installed | 0 |" in text
    assert "| kernels of one decode step, by time | not run |  |" in text


def test_the_page_gets_the_section_between_its_marks() -> None:
    page = report.PAGE.read_text()
    filled = report.fill(page, "TABLES")
    before, _, after = filled.partition("\nTABLES\n")
    assert page.startswith(before)
    assert page.endswith(after)
    assert report.fill(filled, "TABLES") == filled


def test_a_run_without_a_gpu_is_not_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "summary.json"
    file.write_text(json.dumps({**SUMMARY, "device": "cpu"}))
    before = report.PAGE.read_text()
    assert report.main([str(file)]) == 2
    assert "only a run on a GPU" in capsys.readouterr().err
    assert report.PAGE.read_text() == before
