"""A running server with the bundled models, for clients in an environment that has none of Sluice's packages."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Condition, Thread
from typing import IO, Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from scripted_model import write_scripted_model
from sessions import NOTES, write_sessions

ROOT = Path(__file__).parents[2]
COMMAND = ROOT / ".venv" / "bin" / "sluice"
PATIENCE_S = 60.0
PROGRAM_S = 120.0
PORTS = ("--http-port=0", "--grpc-port=0", "--metrics-port=0")
os.environ |= {  # noqa: TID251  the clients read their configuration there
    "OPENAI_API_KEY": "unused",
    "ANTHROPIC_API_KEY": "unused",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "DSPY_CACHEDIR": str(ROOT / "build" / "dspy"),
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class Lines:
    """The lines that a process writes, as they come."""

    def __init__(self, file: IO[str]) -> None:
        self._lines: list[str] = []
        self._has_more = Condition()
        Thread(target=self._read, args=(file,), daemon=True).start()

    def _read(self, file: IO[str]) -> None:
        for line in file:
            with self._has_more:
                self._lines.append(line)
                self._has_more.notify_all()

    def wait_until(self, is_enough: Callable[[list[str]], bool]) -> list[str]:
        """Return the lines so far, once there are enough; all of them after a time if there never are."""
        with self._has_more:
            self._has_more.wait_for(lambda: is_enough(self._lines), PATIENCE_S)
            return list(self._lines)


@contextmanager
def serving_lines(folder: Path, *arguments: str) -> Iterator[tuple[str, Lines]]:
    """Yield the address of a server and its output. It still answers at the end."""
    log_path = folder / "log"
    command = [COMMAND, "serve", *arguments, *PORTS, f"--state-path={folder / 'state'}"]
    with log_path.open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, cwd=folder)
    try:
        assert process.stdout is not None
        lines = Lines(process.stdout)
        listening = re.match(r"Listening on ([^ ]+)", "".join(lines.wait_until(lambda found: len(found) > 1)))
        assert listening, log_path.read_text()
        yield listening[1], lines
        assert process.poll() is None, log_path.read_text()
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


@contextmanager
def serving(folder: Path, *arguments: str) -> Iterator[str]:
    """Yield the address of a server of `rill` and the encoders. It still answers at the end."""
    with serving_lines(folder, *arguments) as (address, _):
        yield address


class ScriptedServer:
    """A server of the model `scripted`, which plays the sessions of `sessions.py` in folders of its own."""

    def __init__(self, url: str, lines: Lines, workspaces: Path) -> None:
        self.url = url
        self._lines = lines
        self._workspaces = workspaces

    def workspace(self, name: str) -> Path:
        """Return the folder of a session, with the notes that it reads."""
        folder = self._workspaces / name
        folder.mkdir()
        (folder / "notes.txt").write_text(NOTES)
        return folder

    def requests(self, num_earlier: int = 0, num_expected: int = 0) -> list[dict[str, Any]]:
        """Return what the access log has of requests with a body after the first `num_earlier`: at least as many as
        are expected, or a test fails."""
        lines = self._lines.wait_until(lambda found: len(_bodies(found)) >= num_earlier + num_expected)
        return _bodies(lines)[num_earlier:]


def _bodies(lines: list[str]) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in lines if line.startswith("{")]
    return [record for record in records if record["bytes_in"]]


@pytest.fixture(scope="session")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedServer]:
    folder = tmp_path_factory.mktemp("scripted")
    write_scripted_model(folder / "model", write_sessions(folder))
    arguments = (str(folder / "model"), "--served-model-name=scripted", "--access-log=json")
    with serving_lines(folder, *arguments) as (url, lines):
        yield ScriptedServer(url, lines, folder)


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


def run_program(command: Sequence[str | Path], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run another's program in a folder, with no variables of this process but PATH. A program that is not installed is
    a reason to skip the test."""
    lacking = next((each for each in command if isinstance(each, Path) and not each.exists()), None)
    if lacking is not None:
        pytest.skip(f"{lacking} is not installed: the Makefile's install of it needs npm")
    return subprocess.run(
        [str(each) for each in command],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **variables},  # noqa: TID251  a program's own
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
