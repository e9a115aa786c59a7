"""Each benchmark measures in small all that it measures at length. What figures must be is the benchmarks' own."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from benchmarks import adapter, executor, experts, guidance, kv_tiers, sampling
from benchmarks.figures import Figure
from benchmarks.rag import orchestration
from benchmarks.routing import decisions
from benchmarks.scheduling import idle_queue
from sluice.bundled import BUNDLED_MODEL, models_folder

pytestmark = pytest.mark.slow
Measure = Callable[[Path], list[Figure]]
EXPERTS = experts.Shape(4, 2, 64, 32)
TURNS = {"NUM_USERS": 3, "NUM_TURNS": 2, "DOCUMENT_TOKENS": 80, "ANSWER_TOKENS": 4}


def of_kv_tiers(folder: Path) -> list[Figure]:
    found = kv_tiers.measure(1, folder, models_folder() / BUNDLED_MODEL / "1", lambda line: None)
    return [each for each in found if each.name == "TTFT of a later turn"]


SMALL: dict[str, tuple[ModuleType, dict[str, Any], Measure, list[str]]] = {
    "executor": (
        executor,
        {"RUNNING": (1, 4), "CROWD": 50},
        lambda _: executor.measure(num_repeats=1, num_steps=3),
        [*(each for each in executor.SAMPLINGS for _ in range(2)), "greedy"],
    ),
    "adapter": (adapter, {"RUNNING": (1, 3)}, lambda _: adapter.measure(1, num_steps=3), ["greedy"] * 2),
    "experts": (
        experts,
        {},
        lambda _: experts.measure(1, (EXPERTS,), ("none",)),
        [f"{form}, {count} tokens" for form in experts.FORMS for count in experts.NUM_TOKENS],
    ),
    "sampling": (
        sampling,
        {"VOCABULARIES": (1500,)},
        lambda _: sampling.measure(num_repeats=1, num_steps=1),
        ["greedy", *sampling.SAMPLINGS] * 2,
    ),
    "KV tiers": (kv_tiers, TURNS, of_kv_tiers, [*kv_tiers.SUBJECTS]),
    "routing": (
        decisions,
        {"NUM_CHOICES": 20, "OTHER_BLOCKS": 200},
        lambda _: decisions.measure(num_repeats=1),
        [*decisions.HELD],
    ),
}


@pytest.mark.parametrize(("module", "small", "measure", "subjects"), SMALL.values(), ids=SMALL)
def test_every_subject_is_measured(
    module: ModuleType,
    small: dict[str, Any],
    measure: Measure,
    subjects: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in small.items():
        monkeypatch.setattr(module, name, value)
    figures = measure(tmp_path)
    assert [each.subject for each in figures] == subjects


@pytest.mark.parametrize(
    ("measure", "num_figures"),
    [
        (lambda: guidance.measure(num_repeats=2, num_steps=3, vocabularies=(1000,)), 5),
        (lambda: orchestration.measure(2, num_requests=10), 2),
        (lambda: idle_queue.measure(num_repeats=2, lengths=(50,), num_steps=3), 3),
    ],
    ids=["guidance", "a step of an ensemble", "a long queue"],
)
def test_every_figure_is_measured(measure: Callable[[], list[Figure]], num_figures: int) -> None:
    figures = measure()
    assert len({(each.name, each.subject) for each in figures}) == len(figures) == num_figures
    assert all(len(each.samples) == 2 for each in figures)
