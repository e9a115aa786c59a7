"""What tests of `sluice build` have in common: the command as a user runs it, and a small checkpoint."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli.build.command import command
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint


@dataclass(frozen=True)
class Ended:
    """An ended command."""

    code: int
    out: str
    err: str


Build = Callable[..., Ended]


@pytest.fixture
def build(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Build:
    """Runs it, with a cache of its own."""
    monkeypatch.setenv("SLUICE_CACHE_PATH", str(tmp_path / "cache"))

    def run(*arguments: str | Path) -> Ended:
        try:
            code = command([str(argument) for argument in arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            code = end.code
        said = capfd.readouterr()
        return Ended(code, said.out, said.err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with a tokenizer."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoints") / "tiny")
