"""Whole tunings on servers that are started for them: a small language model, and the walk through a batcher's
settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.serving.config.pbtxt import read_pbtxt
from sluice.tuning.command import command
from tests.paths import MODELS
from tests.tuning.repositories import write_classifier, write_pipeline

pytestmark = pytest.mark.timeout(600)


def tune(folder: Path, *arguments: str) -> dict[str, Any]:
    assert command(["--out", str(folder), "--quiet", *arguments]) == 0
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def test_a_batcher_is_found_that_the_configuration_lacks(tmp_path: Path) -> None:
    """A batch takes the same time whatever its size, so that a batcher answers several requests in the time of one."""
    root = write_classifier(tmp_path / "models")
    search = ("max_queue_delay_microseconds=2000", "preferred_batch_size=none", "instance_count=1", "max_batch_size=16")
    options = [word for each in search for word in ("--search", each)]
    arguments = ("--model-repository", str(root), "classifier", "--concurrency", "16", "--duration", "0.5", *options)
    result = tune(tmp_path / "out", *arguments)
    assert result["is_better_than_default"]
    assert result["use"]["changed"]["max_queue_delay_microseconds"] == 2000
    assert result["num_trials"] == {"simulated": 0, "scaled": 0, "live": 2, "round": 10}
    [rate] = [each for each in result["comparisons"] if each["name"] == "requests_per_s"]
    assert rate["interval"][0] > 1.0
    config = read_pbtxt(tmp_path / "out" / "repository" / "classifier" / "config.pbtxt").config
    assert config.dynamic_batching.max_queue_delay_microseconds == 2000
    assert (root / "classifier" / "config.pbtxt").read_text().startswith("# written by hand")
    # Going on measures nothing anew.
    trials = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").iterdir()}
    assert tune(tmp_path / "out", *arguments) == result
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out" / "trials").iterdir()} == trials


def test_the_models_of_a_pipeline_are_tuned_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The two steps have no batcher at first; nothing can meet a bound that both of them together exceed."""
    root = write_pipeline(tmp_path / "models")
    names = ("bert", "tokenizer")
    fixed = {"preferred_batch_size": "none", "instance_count": "1", "max_batch_size": "16"}
    settings = {f"{name}.{field}": value for name in names for field, value in fixed.items()}
    settings |= {f"{name}.max_queue_delay_microseconds": "1000" for name in names}
    options = [word for name, values in settings.items() for word in ("--search", f"{name}={values}")]
    load = ("--concurrency", "8", "--duration", "0.5", "--constraint", "p50_e2e<=1")
    arguments = ("--model-repository", str(root), "pipeline", *load, *options, "--out", str(tmp_path / "out"))
    assert command([*arguments, "--quiet"]) == 1
    assert "nothing that was tried meets the constraints on a server. The nearest" in capsys.readouterr().err
    trials = [json.loads(path.read_text()) for path in sorted((tmp_path / "out" / "trials").iterdir())]
    rates = {str(each["point"]): each["figures"]["requests_per_s"] for each in trials}
    assert len(rates) == 4
    assert next(iter(rates.values())) < max(rates.values())


def test_a_language_model_is_searched_in_the_simulator_and_checked_on_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sequence at a time is worse than the defaults, so that there is nothing to compare in turns."""
    monkeypatch.setattr("sluice.load.calibrate.NUM_ROUNDS", 1)
    options = ("--concurrency", "1,4", "--prompt-tokens", "32", "--output-tokens", "16", "--search", "max-num-seqs=1")
    fixed = ("--", "--max-num-batched-tokens=512", "--kv-cache-memory=64M")
    result = tune(tmp_path / "out", str(MODELS / "rill"), *options, "--duration", "0.5", "--checks", "1", *fixed)
    trials = result["num_trials"]
    assert trials.pop("scaled", 4) == 4, "where servers are slower than simulated, the search is done once more"
    assert trials == {"simulated": 4, "live": 1, "round": 0}
    assert not result["is_better_than_default"]
    assert result["use"] == {"settings": {"max-num-seqs": 64}, "changed": {}, "concurrency": 4}
    costs = json.loads((tmp_path / "out" / "costs" / "default.json").read_text())
    assert costs["max_num_seqs"] == 64
    assert costs["costs"]["step_s"] + costs["costs"]["decode_seq_s"] > 0.0
    script = (tmp_path / "out" / "serve.sh").read_text()
    assert script.endswith(f"exec sluice serve {MODELS / 'rill'} --max-num-batched-tokens=512 --kv-cache-memory=64M\n")
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()


def test_a_server_that_does_not_start_is_said_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command([str(tmp_path), "--out", str(tmp_path / "out"), "--quiet"]) == 1
    message = capsys.readouterr().err
    assert "with the default settings the server did not start" in message
    assert "MODEL must be the folder of a HuggingFace checkpoint" in message
