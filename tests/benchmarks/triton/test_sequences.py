from pathlib import Path

import pytest

from benchmarks.triton.sequences import measure

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_REQUESTS = 5_000


def test_every_state_is_right_of_a_hundred_sequences_at_once(tmp_path: Path) -> None:
    figures = measure(tmp_path, num_sequences=100, num_requests=NUM_REQUESTS)
    answers = {(figure.name, figure.subject): figure.median for figure in figures if figure.target is not None}
    subjects = ("onnx, direct", "onnx, oldest", "python, direct", "python, oldest")
    assert answers == {("sequences: right answers", subject): NUM_REQUESTS for subject in subjects} | {
        ("sequences: wrong answers", subject): 0 for subject in subjects
    }
