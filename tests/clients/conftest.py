"""A running server with the bundled models, for clients in an environment that has none of Sluice's packages."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / ".venv" / "bin" / "sluice"
PATIENCE_S = 60.0
PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
os.environ |= {  # noqa: TID251  the clients read their configuration there
    "OPENAI_API_KEY": "unused",
    "ANTHROPIC_API_KEY": "unused",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DSPY_CACHEDIR": str(ROOT / "build" / "dspy"),
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Yield the address of a server of `rill` and the encoders. It still answers at the end."""
    log_path = folder / "log"
    command = [COMMAND, "serve", *PORTS, f"--state-path={folder / 'state'}", *arguments]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        listening = re.match(r"Listening on ([^ ]+)", process.stdout.readline())
        assert listening and process.stdout.readline(), log_path.read_text()
        yield listening[1]
        assert process.poll() is None, log_path.read_text()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.fixture(scope="session")
def exact_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that computes in float32, as its references do."""
    with serving(tmp_path_factory.mktemp("exact"), "--dtype=f32") as address:
        yield address


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    return f"{url}/v1"
