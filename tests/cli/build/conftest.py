"""Fixtures of the tests of `sluice build`: the command as a user runs it, and a small checkpoint."""

from pathlib import Path

import pytest

from cli.build.command import command
from tests.cli.build.parts import Build, CommandResult
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def build(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Return a function that runs the command, with a cache of its own."""
    monkeypatch.setenv("SLUICE_CACHE_PATH", str(tmp_path / "cache"))

    def run(*arguments: str | Path) -> CommandResult:
        try:
            code = command([str(argument) for argument in arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
        output = capfd.readouterr()
        return CommandResult(code, output.out, output.err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a Llama of two layers with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
