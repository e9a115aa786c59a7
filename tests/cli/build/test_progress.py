"""The progress that a build shows on a terminal, and elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from sluice.cli.build.building import StepProgress
from sluice.cli.build.steps import BuildStep, CopyStep, WriteStep
from sluice.engine.model_folder import ModelFormat


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_for_each_step(tiny: Path, tmp_path: Path, is_terminal: bool) -> None:
    steps: tuple[BuildStep, ...] = (
        CopyStep("copy the model", tiny, tmp_path / "model", ModelFormat.HUGGINGFACE),
        WriteStep("write [a] note", tmp_path / "note", "text"),
    )
    output = io.StringIO()
    progress = StepProgress(Console(file=output, force_terminal=is_terminal, width=200))
    progress.expect(len(steps))
    for step in steps:
        progress.run(step)
    assert all(line in output.getvalue() for line in ("[1/2] copy the model\n", "[2/2] write [a] note\n"))
    assert ("MiB" in output.getvalue() or "KiB" in output.getvalue()) is is_terminal
    assert (tmp_path / "model" / "config.json").is_file()
