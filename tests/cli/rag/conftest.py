from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sluice.cli.rag.command import command
from tests.gateway.api.rag.parts import RagServer, rag_server


@pytest.fixture(scope="session")
def shared_rag() -> Iterator[RagServer]:
    with rag_server() as server:
        yield server


@pytest.fixture
def rag(shared_rag: RagServer, monkeypatch: pytest.MonkeyPatch) -> RagServer:
    """A server without collections, whose address SLUICE_URL holds."""
    shared_rag.reset()
    monkeypatch.setenv("SLUICE_URL", shared_rag.url)
    return shared_rag


Sluice = Callable[..., int]


@pytest.fixture
def sluice() -> Sluice:
    """Runs `sluice rag` with some arguments and returns its exit code."""

    def run(*arguments: str | Path) -> int:
        try:
            return command([str(argument) for argument in arguments])
        except SystemExit as end:
            assert isinstance(end.code, int)
            return end.code

    return run


@pytest.fixture
def handbook(tmp_path: Path) -> Path:
    """A folder with documents and other files."""
    root = tmp_path / "handbook"
    (root / "guides" / "deep").mkdir(parents=True)
    (root / ".git").mkdir()
    (root / "refunds.md").write_text("# Refunds\n\nMoney comes back in 30 days.\n")
    (root / "guides" / "cats.txt").write_text("Cats sleep most of the day.\n")
    (root / "guides" / "deep" / "page.html").write_text("<title>Page</title><p>Hello there</p>")
    (root / ".git" / "hidden.md").write_text("hidden")
    (root / ".hidden.md").write_text("hidden")
    (root / "program.py").write_text("print('x')\n")
    return root
