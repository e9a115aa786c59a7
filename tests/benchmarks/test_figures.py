import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.figures import Figure, Target, print_figures, write_figures

FIGURES = [
    Figure("served output", "S", "tokens/s", (3000.0, 4000.0, 3600.0), Target(3500.0, is_ceiling=False)),
    Figure("ITL", "S", "ms", (3.0, 1.0, 2.5), Target(2.0)),
]


def test_targets_are_judged_by_the_median() -> None:
    output = io.StringIO()
    print_figures(FIGURES, Console(file=output, width=140))
    served, itl = output.getvalue().splitlines()[1:]
    assert ">= 3500 met" in served
    assert "<= 2 missed" in itl


@pytest.mark.parametrize(("target", "met", "missed"), [(Target(2.0), 2.0, 2.1), (Target(2.0, False), 2.0, 1.9)])
def test_a_target_includes_its_limit(target: Target, met: float, missed: float) -> None:
    assert target.is_met_by(met)
    assert not target.is_met_by(missed)


@pytest.mark.slow
def test_the_file_holds_every_repeat_and_where_it_was_measured(tmp_path: Path) -> None:
    document = json.loads(write_figures(FIGURES, tmp_path, load_before=0.5).read_bytes())
    assert [figure["samples"] for figure in document["figures"]] == [[3000.0, 4000.0, 3600.0], [3.0, 1.0, 2.5]]
    assert [figure["median"] for figure in document["figures"]] == [3600.0, 2.5]
    assert document["machine"]["num_cores"] >= 1
    assert document["commit"]
    assert document["load_average_before"] == 0.5
