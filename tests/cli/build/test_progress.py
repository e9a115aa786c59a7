"""What a build shows on a terminal, and elsewhere."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from engine.model_folder import ModelFormat
from cli.build.progress import Watch
from cli.build.steps import Copy, Step, Write


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_line_for_each_step(tiny: Path, tmp_path: Path, is_terminal: bool) -> None:
    steps: tuple[Step, ...] = (
        Copy("copy the model", tiny, tmp_path / "model", ModelFormat.HUGGINGFACE),
        Write("write [a] note", tmp_path / "note", "text"),
    )
    shown = io.StringIO()
    watch = Watch(Console(file=shown, force_terminal=is_terminal, width=200))
    watch.expect(len(steps))
    for step in steps:
        watch.run(step)
    assert all(line in shown.getvalue() for line in ("[1/2] copy the model\n", "[2/2] write [a] note\n"))
    assert ("MiB" in shown.getvalue() or "KiB" in shown.getvalue()) is is_terminal
    assert (tmp_path / "model" / "config.json").is_file()
