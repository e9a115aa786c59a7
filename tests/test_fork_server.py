"""A command that starts by a fork is a process like any other."""

import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.fork_server import fork_server
from tests.server_process import serve_command, start_command
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.slow


def test_it_prints_and_ends_as_one_that_is_started_anew(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log, fork_server().start(["--version"], log) as process:
        assert process.stdout is not None
        printed, code = process.stdout.read(), process.wait(PATIENCE_S)
    assert printed.startswith("sluice ")
    assert (code, process.poll()) == (0, 0)
    with (tmp_path / "log").open("w") as log, fork_server().start(["serve", "--no-such-flag"], log) as process:
        assert process.wait(PATIENCE_S) == 2
    assert "--no-such-flag" in (tmp_path / "log").read_text()


def test_it_can_be_killed(checkpoint: Path, tmp_path: Path) -> None:
    command = serve_command("--http-port=0", "--metrics-port=0", str(checkpoint))
    with (tmp_path / "log").open("w") as log, start_command(command, log) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("Listening on ")
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(PATIENCE_S) == -signal.SIGKILL
    assert not psutil.pid_exists(process.pid)


def test_another_environment_needs_imports_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fork_server().suits(None)
    assert not fork_server().suits(dict(os.environ))  # noqa: TID251 - as a test passes it on
    monkeypatch.setenv("SLUICE_HTTP_PORT", "1")
    assert not fork_server().suits(None)
