"""The command line, and the files and pages of a tuning whose trials are made up."""

import re
import sys
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from sluice.load.config import ApiKind, Workload
from sluice.tuning.command import command
from sluice.tuning.comparison import judge
from sluice.tuning.driving import CONCURRENCY, Drive, TunePlan
from sluice.tuning.figures import FigureConstraint, Goal, Objective
from sluice.tuning.language_model import EngineLimits, LanguageModelSubject
from sluice.tuning.page import pareto_front, render_page
from sluice.tuning.report import print_report, result_document
from sluice.tuning.run import Tuning
from sluice.tuning.space import Dimension
from sluice.tuning.trials import Stage, TrialStore
from tests.tuning.repositories import write_classifier


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--constraint", "p99_ttft<=x"], "write a constraint as"),
        (["--search", "max-num-seqs"], "write what to search as NAME=VALUES"),
        (["--search", "max-num-seqs=4", "--search", "max-num-seqs=8"], "is given twice"),
        (["--objective", "goodput"], "--slo ttft=500,itl=50"),
        (["--concurrency", "1", "--request-rate", "1"], "give one of them"),
        (["--concurrency", "0"], "whole numbers of at least 1"),
        (["--concurrency", "1.5"], "whole numbers of at least 1"),
        (["--model-repository", "REPO"], "needs MODEL"),
        (["--model-repository", "REPO", "x"], "has no such model; it has classifier"),
        (["--model-repository", "REPO", "classifier", "--costs", "REPO/classifier/config.pbtxt"], "--costs is for"),
        (["--model-repository", "nowhere", "x"], "no such folder"),
        (["--rounds", "2"], "at least 5"),
        (["--trails", "2"], "did you mean --trials"),
        (["--prompt-tokens", "16", "--prefix-tokens", "16"], "must be below the shortest prompt"),
    ],
)
def test_a_bad_option_is_named_with_what_to_write(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_classifier(tmp_path)
    try:
        code = command([word.replace("REPO", str(tmp_path)) for word in arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


def test_without_optuna_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (
        "sluice.tuning.search",
        "sluice.tuning.run",
        "sluice.tuning.comparison",
        "sluice.tuning.simulated_search",
    ):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert command(["--out", str(tmp_path)]) == 1
    assert "pip install 'sluice[tune]'" in capsys.readouterr().err


@pytest.fixture
def tuning(tmp_path: Path) -> Tuning:
    load = Dimension(CONCURRENCY, (1, 8), 1)
    limits = EngineLimits("openvino", 64, 2048, 1024, 1000, 32)
    subject = LanguageModelSubject("/models/a<b", (), {}, load, limits=limits)
    drive = Drive(ApiKind.COMPLETIONS, None, Workload(), load.name, 5.0, 60.0, None)
    goal = Goal(Objective("tokens_per_s"), (FigureConstraint.parse("p99_ttft<=100"),))
    store = TrialStore.open(tmp_path, {})
    default, found = subject.space.default_point(8), subject.space.default_point(8) | {"max-num-seqs": 16}
    slow = default | {"max-num-seqs": 8}
    for stage in (Stage.SIMULATED, Stage.LIVE):
        for point, rate, ttft in ((default, 100.0, 50.0), (found, 130.0, 60.0), (slow, 200.0, 500.0)):
            figures = {"tokens_per_s": rate, "p99_ttft": ttft}
            store.add(stage, point, figures | ({"memory": 1e9} if stage is Stage.LIVE else {}), "", 1.0)
    store.add(Stage.LIVE, default | {"max-num-seqs": 4}, None, "the server did not start", 1.0)
    rounds = []
    for number in range(1, 6):
        figures = {"tokens_per_s": 100.0 + number, "p99_ttft": 50.0}
        a = store.add(Stage.ROUND, default, figures, "", 1.0, number)
        b = store.add(Stage.ROUND, found, figures | {"tokens_per_s": 131.0 + number}, "", 1.0, number)
        rounds.append((a, b))
    plan = TunePlan(subject, drive, goal, tmp_path, False, None, 9, 4, 5, 0, {})
    return Tuning(plan, subject.space, store, rounds, judge((default, found), rounds, goal))


def test_the_table_says_what_to_use_and_why(tuning: Tuning) -> None:
    console = Console(width=140, record=True, file=StringIO())
    print_report(tuning, console)
    text = console.export_text()
    assert "use      max-num-seqs=16, at concurrency 8" in text
    assert re.search(r"because  1\.30 times the defaults' tokens_per_s \(134\.0 against 103\.0; 95 % sure: 1\.", text)
    assert re.search(r"live +8 +130\.0 +60\.0 ms +954 MiB +yes +max-num-seqs=16", text)
    assert re.search(r"live +8 +100\.0 +50\.0 ms +954 MiB +yes +defaults", text)
    assert "max-num-seqs=8" not in text


def test_the_page_has_the_picture_and_nothing_from_elsewhere(tuning: Tuning) -> None:
    page = render_page(tuning, "sluice tune '/models/a<b'")
    assert "/models/a&lt;b" in page and "a<b" not in page
    assert page.count("<svg") == 2
    assert page.count("<circle") == 6
    assert "tokens_per_s against p99_ttft, on servers" in page
    assert "max-num-seqs=16, max-num-batched-tokens=auto, concurrency=8: tokens_per_s 130.0" in page
    assert not re.search(r"(src|href)=|@import|url\(", page)


def test_the_front_is_what_no_other_trial_beats(tuning: Tuning) -> None:
    trials = [trial for trial in tuning.store.of(Stage.LIVE) if trial.figures]
    assert pareto_front(trials, "p99_ttft", "tokens_per_s") == [(50.0, 100.0), (60.0, 130.0), (500.0, 200.0)]
    assert pareto_front(trials[1:] + trials[:1], "memory", "tokens_per_s") == [(1e9, 200.0)]


def test_the_result_is_json_with_the_settings_to_use(tuning: Tuning) -> None:
    document = msgspec.json.decode(msgspec.json.encode(result_document(tuning, "sluice tune")))
    assert document["use"]["changed"] == {"max-num-seqs": 16}
    assert document["use"]["concurrency"] == 8
    assert document["is_better_than_default"] is True
    assert document["num_trials"] == {"simulated": 3, "scaled": 0, "live": 4, "round": 10}
    assert document["comparisons"][0]["name"] == "tokens_per_s"
