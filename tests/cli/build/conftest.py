"""Fixtures of the tests of `sluice build`: the command as a user runs it, and a small checkpoint."""

from pathlib import Path

import pytest

from sluice.cli.build.command import command
from tests.cli.build.parts import Build, CommandResult
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def build(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Return a function that runs the command with a cache of its own, and the output `models` where none is given."""
    monkeypatch.setenv("SLUICE_CACHE_PATH", str(tmp_path / "cache"))

    def run(*arguments: str | Path, code: int = 0, error: str = "") -> CommandResult:
        output = () if "--output" in arguments else ("--output", tmp_path / "models")
        try:
            ended = command([str(argument) for argument in (*arguments, *output)])
        except SystemExit as end:
            assert isinstance(end.code, int)
            ended = end.code
        told = capfd.readouterr()
        assert (ended, error in told.err) == (code, True), told.err
        return CommandResult(told.out, told.err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of two layers with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
