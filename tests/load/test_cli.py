import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice.load.__main__ import command
from sluice.load.report import report_lines
from tests.load.scripted_server import Script, ScriptedServer, Wire, command_against, good_stream, run_against


def run_command(script: Script, *flags: str) -> tuple[int, ScriptedServer]:
    return command_against(script, "--url", "URL", "--quiet", "--output-tokens", "3", *flags)


async def broken(wire: Wire) -> None:
    await wire.whole("500 Internal Server Error", b"oops")


def test_a_served_run_exits_0_and_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    status, server = run_command(good_stream, "--num-requests", "4", "--concurrency", "2")
    assert status == 0
    assert len(server.wires) == 4
    assert all(wire.body["model"] == "first" for wire in server.wires)
    output = capsys.readouterr().out
    for expected in ("TTFT", "ITL", "TPOT", "E2E", "client wait", "12 output", "4 served, 0 failed"):
        assert expected in output


def test_failures_exit_1_unless_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(broken)[0] == 1
    assert "http_500: 32, first: oops" in capsys.readouterr().out
    assert run_command(broken, "--allow-failures")[0] == 0


def test_a_failed_warmup_ends_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(broken, "--warmup", "1")[0] == 2
    assert "warm-up request failed: http_500: oops" in capsys.readouterr().err


def test_warmup_requests_are_sent_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    _, server = run_command(good_stream, "--warmup", "2", "--num-requests", "3")
    assert len(server.wires) == 5
    assert "3 served" in capsys.readouterr().out


def written_json(tmp_path: Path, *flags: str) -> dict[str, Any]:
    file = tmp_path / "run.json"
    run_command(good_stream, "--num-requests", "2", "--json", str(file), *flags)
    document: dict[str, Any] = json.loads(file.read_bytes())
    return document


def test_json_holds_what_is_needed_to_repeat_and_check(tmp_path: Path) -> None:
    document = written_json(tmp_path, "--seed", "9", "--slo", "ttft=1000")
    assert document["config"]["workload"]["seed"] == 9
    assert "--seed 9" in document["command"]
    assert document["machine"]["sluice_version"]
    assert document["summary"]["itl_ms"]["num_samples"] == 4
    assert document["summary"]["client_wait_ms"]["num_samples"] == 2
    assert [row["output_tokens"] for row in document["requests"]] == [3, 3]


def test_secrets_reach_the_server_and_no_file(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    flags = ("--api-key", "hush", "--header", "X-Token: mum", "--header=X-Other: sesame", "--num-requests", "1")
    _, server = run_command(good_stream, "--json", str(file), *flags)
    head = server.wires[0].head
    assert b"Authorization: Bearer hush\r\n" in head
    assert b"X-Token: mum\r\n" in head
    assert not [secret for secret in ("hush", "mum", "sesame") if secret in file.read_text()]


def test_an_unreachable_server_is_said_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--url", "http://127.0.0.1:1", "--quiet"]) == 2
    assert "cannot reach http://127.0.0.1:1" in capsys.readouterr().err


def test_a_busy_client_names_the_way_out() -> None:
    run = run_against(good_stream)
    busy = replace(run, busiest_cpu_s=run.summary.wall_s)
    assert any("Use --processes 2" in line for line in report_lines(busy))
    idle = replace(run, busiest_cpu_s=0.0)
    assert not any("warning" in line for line in report_lines(idle))


def test_energy_and_metrics_are_said_to_be_unavailable(capsys: pytest.CaptureFixture[str]) -> None:
    run_command(good_stream, "--num-requests", "1")
    printed = capsys.readouterr().out
    assert "server    its metrics are unavailable: " in printed
    assert "energy    " in printed
    run_command(good_stream, "--num-requests", "1", "--metrics-url", "none")
    assert "metrics" not in capsys.readouterr().out
