"""`sluice logs` over a real server, and over files in both formats."""

import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from sluice.cli.logs import command
from sluice.log_lines import JsonFormatter, TextFormatter
from tests.server_process import ServerProcess

TEXT = TextFormatter("%(asctime)s %(levelname)s %(name)s [%(request_id)s] %(message)s")


def write_log(path: Path, formatter: logging.Formatter) -> None:
    """Write three lines, the last with a traceback."""
    try:
        raise ValueError("x")
    except ValueError:
        error = sys.exc_info()
    lines = (
        {"msg": "begun", "levelname": "INFO", "request_id": "r-1"},
        {"msg": "slow [queue]", "levelname": "WARNING", "request_id": "r-2"},
        {"msg": "failed", "levelname": "ERROR", "request_id": "r-1", "exc_info": error},
    )
    records = [logging.makeLogRecord({"name": "a.b", **each}) for each in lines]
    path.write_text("".join(formatter.format(each) + "\n" for each in records))


@contextmanager
def running(arguments: list[str]) -> Iterator[IO[str]]:
    """Run a command, and end it."""
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout
        finally:
            process.kill()


@pytest.mark.parametrize("formatter", [TEXT, JsonFormatter("-")], ids=["text", "json"])
def test_a_file_is_read_in_both_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], formatter: logging.Formatter
) -> None:
    write_log(tmp_path / "log", formatter)

    def shown(*arguments: str) -> list[str]:
        assert command([str(tmp_path / "log"), "--json", *arguments]) == 0
        return [json.loads(line)["message"] for line in capsys.readouterr().out.splitlines()]

    begun, slow, failed = shown()
    assert (begun, slow) == ("begun", "slow [queue]")
    assert failed.startswith("failed\n") and "ValueError: x" in failed, "the traceback belongs to its line"
    assert shown("--level", "warning") == [slow, failed]
    assert shown("--request-id", "r-1") == [begun, failed]
    assert shown("-n", "1") == [failed]
    assert shown("--since", "3600") == [begun, slow, failed]


def test_a_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    write_log(path, TEXT)
    arguments = [sys.executable, "-m", "sluice.cli", "logs", str(path), "-f", "--level", "warning", "-n", "2"]
    with running(arguments) as output:
        assert "slow [queue]" in output.readline(), "what there was comes first"
        with path.open("a") as file:
            for level, text in (("INFO", "too low"), ("ERROR", "came later")):
                record = {"name": "a", "levelname": level, "request_id": "-", "msg": text}
                file.write(TEXT.format(logging.makeLogRecord(record)) + "\n")
        until_then = [output.readline()]
        while "came later" not in until_then[-1]:
            assert until_then[-1], "the command has ended"
            until_then.append(output.readline())
        assert not any("too low" in line for line in until_then)


def test_a_server_is_asked(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    with server.client() as client:
        client.post("/v1/admin/requests/none/cancel")
        body = client.get("/v1/admin/logs", params={"level": "info"}).json()
        assert {"time", "level", "logger", "request_id", "message", "process"} == body["data"][0].keys()
        for wrong in ({"level": "loud"}, {"limit": 2001}, {"since_secs": -1}):
            assert client.get("/v1/admin/logs", params=wrong).status_code == 400
    assert command([server.base_url, "-n", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 1 and all(" [" in line for line in lines)
    assert command([server.base_url, "--request-id", "nobody"]) == 0
    assert capsys.readouterr().out == ""


def test_a_server_is_followed(server: ServerProcess) -> None:
    arguments = [sys.executable, "-m", "sluice.cli", "logs", server.base_url, "-f"]
    with running(arguments) as output:
        assert " INFO " in output.readline(), "what there was comes first"


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command([str(tmp_path / "none")]) == 1
    assert "none" in capsys.readouterr().err
