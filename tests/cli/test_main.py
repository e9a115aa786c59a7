import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pytest

from sluice.cli import serve, usage
from sluice.cli.__main__ import BROKEN_PIPE, main
from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import GROUPS, list_options
from tests.waiting import PATIENCE_S

HEAVY = {"fastapi", "transformers", "uvicorn", "numpy", "zmq", "openvino", "load"}


def test_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    assert "  serve         Serve models: OpenAI API" in overview
    assert "  load          " in overview


def test_without_arguments_it_shows_the_overview_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "commands:" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"sluice {version('sluice')}\n"


def test_unknown_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sevre"]) == 2
    assert (
        capsys.readouterr().err
        == "sluice: error: unknown command 'sevre'; commands: build, doctor, dynamo-worker, engine, fleet, keys, load, "
        "logs, profile, rag, repository, run-batch, runtime, serve, simulate, smoke, tenants, top, tune, usage\n"
    )


def read_help(command: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit):
        command(["--help"])
    return " ".join(capsys.readouterr().out.split())


def test_help_tells_a_default_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert read_help(usage.command, capsys).count("Default: http://127.0.0.1:8000") == 1


def test_help_explains_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    shown = read_help(serve.command, capsys)
    for group in GROUPS.values():
        for _, _, declared in list_options(group):
            assert declared.flag in shown
    assert "8001 gRPC" in shown
    assert "Default: 64M" in shown
    assert "Default: 2592000" in shown
    assert "Default: QuotaLimits" not in shown


def test_http_address_is_triton_s_name_for_host() -> None:
    assert parse_flags(["--http-address", "::1", "--strict"]) == {"--host": "::1", "--strict": True}


def test_a_bad_option_is_told_before_anything_heavy_is_imported() -> None:
    script = (
        "import sys; from sluice.cli.__main__ import main; main(['serve', '--http-port', 'x']); "
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout == "[]\n", done.stderr


def test_a_reader_that_has_seen_enough_ends_a_command_without_a_word(tmp_path: Path) -> None:
    for number in range(300):  # whose names alone are more than a pipe holds
        (tmp_path / f"model_{number:0240}" / "1").mkdir(parents=True)
    command = [sys.executable, "-m", "sluice.cli", "repository", "check", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(PATIENCE_S) == BROKEN_PIPE
