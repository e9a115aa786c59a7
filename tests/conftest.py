"""Fixtures that several rooms share."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pipelines.text.tokenizer import Tokenizer
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.paths import RILL_TOKENIZER
from tests.server_process import ServerProcess, StartServer, running_server


@pytest.fixture(scope="session")
def rill_path() -> Path:
    return RILL_TOKENIZER


@pytest.fixture(scope="session")
def rill() -> Tokenizer:
    return Tokenizer.load(RILL_TOKENIZER)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose streams can be as long as a test needs."""
    return write_tiny_checkpoint(tmp_path_factory.mktemp("checkpoint") / "1")


@pytest.fixture(scope="session")
def server(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that leave it as it was."""
    with running_server(checkpoint, tmp_path_factory.mktemp("server") / "log") as running:
        running.wait_ready()
        yield running


@pytest.fixture
def start_server(checkpoint: Path, tmp_path: Path) -> Iterator[StartServer]:
    """Starts a server that the test may do with as it likes."""
    with ExitStack() as stack:

        def start(*arguments: str, is_ready: bool = True) -> ServerProcess:
            running = stack.enter_context(running_server(checkpoint, tmp_path / "log", *arguments))
            if is_ready:
                running.wait_ready()
            return running

        yield start
