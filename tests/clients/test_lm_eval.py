"""lm-eval-harness scores texts over completions (echo and logprobs), and its numbers are those of transformers."""

import json
import subprocess

import pytest
from conftest import ROOT
from lm_eval.api.instance import Instance
from lm_eval.models.openai_completions import LocalCompletionsAPI

CHECKPOINT = ROOT / "models" / "rill" / "1"
PAIRS = [
    ("What does len do?", " It returns the length of an object."),
    ("The function open() opens a file", " and returns a file object."),
    ("A tuple is", " an immutable sequence"),
    ("Naïve café:", " 12 € — done"),
]


def test_loglikelihoods_are_those_of_transformers(exact_url: str) -> None:
    lm = LocalCompletionsAPI(
        model="rill", base_url=f"{exact_url}/v1/completions", tokenizer=str(CHECKPOINT), max_length=1024
    )
    requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(PAIRS)]
    scored = lm.loglikelihood(requests)
    reference = subprocess.run(
        [ROOT / ".venv" / "bin" / "python", ROOT / "tests" / "clients" / "loglikelihoods.py", CHECKPOINT],
        input=json.dumps(PAIRS),
        capture_output=True,
        text=True,
        check=False,
    )
    assert reference.returncode == 0, reference.stderr
    for (logprob, is_greedy), (expected, was_greedy) in zip(scored, json.loads(reference.stdout), strict=True):
        assert logprob == pytest.approx(expected, abs=1e-3) and is_greedy == was_greedy
