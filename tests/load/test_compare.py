import asyncio
import json
from pathlib import Path

import pytest

from load import compare_command
from load.__main__ import command
from tests.load.scripted_server import Script, Wire, good_stream, serving

SLOWER_S = 0.03


async def slow_stream(wire: Wire) -> None:
    await asyncio.sleep(SLOWER_S)
    await good_stream(wire)


def measure(script: Script, file: Path, *flags: str) -> Path:
    async def scenario() -> None:
        async with serving(script) as server:
            argv = ["--url", server.url, "--quiet", "--output-tokens", "3", "--num-requests", "24", *flags]
            assert await asyncio.to_thread(command, [*argv, "--json", str(file)]) == 0

    asyncio.run(scenario())
    return file


def rows(printed: str) -> dict[str, str]:
    """The verdicts by the figure's name."""
    lines = [line for line in printed.splitlines() if ", ms  " in line or "/s  " in line]
    verdicts = ("B is better", "B is worse", "no difference")
    return {line.split("  ")[0]: next(each for each in verdicts if each in line) for line in lines}


def test_a_slower_server_is_worse_and_the_same_is_no_different(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast, slow = measure(good_stream, tmp_path / "fast"), measure(slow_stream, tmp_path / "slow")
    capsys.readouterr()
    assert command(["compare", str(fast), str(slow)]) == 0
    assert rows(capsys.readouterr().out)["TTFT p50, ms"] == "B is worse"
    assert command(["compare", str(slow), str(fast)]) == 0
    assert rows(capsys.readouterr().out)["TTFT p50, ms"] == "B is better"
    assert command(["compare", str(slow), str(slow)]) == 0
    assert rows(capsys.readouterr().out)["E2E p50, ms"] == "no difference"


@pytest.mark.parametrize("content", ["{}", "no JSON", json.dumps({"tool": "sluice load", "requests": 5})])
def test_what_is_no_report_is_named(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(content)
    assert command(["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "not a report of `sluice load --json`" in capsys.readouterr().err


def test_two_servers_in_turns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_command, "_PAUSE_S", 0.0)

    async def scenario() -> tuple[int, list[str], list[str]]:
        async with serving(good_stream) as a, serving(slow_stream) as b:
            argv = ["ab", "--url-a", a.url, "--url-b", b.url, "--quiet", "--output-tokens", "3", "--num-requests", "4"]
            status = await asyncio.to_thread(command, argv)
            of_a, of_b = ([json.dumps(wire.body["prompt"]) for wire in each.wires] for each in (a, b))
            return status, of_a, of_b

    status, of_a, of_b = asyncio.run(scenario())
    assert status == 0
    assert of_a == of_b
    assert len(set(of_a)) == 20, "each round has requests of its own"
    found = rows(capsys.readouterr().out)
    assert found["TTFT p50, ms"] == "B is worse"
    assert found["requests/s"] == "B is worse"


def test_the_page_has_figures_and_plots(tmp_path: Path) -> None:
    measure(good_stream, tmp_path / "json", "--html", str(tmp_path / "page.html"), "--csv", str(tmp_path / "rows.csv"))
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == 6
    assert "p99, 95 % sure" in page
    assert "24 served, 0 failed" in page
    assert "http://" not in page.replace("http://127.0.0.1", "")
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 25


def test_a_page_without_a_served_request(tmp_path: Path) -> None:
    async def broken(wire: Wire) -> None:
        await wire.whole("500 Internal Server Error", b"oops")

    async def scenario() -> None:
        async with serving(broken) as server:
            argv = ["--url", server.url, "--quiet", "--num-requests", "2", "--html", str(tmp_path / "page.html")]
            assert await asyncio.to_thread(command, argv) == 1

    asyncio.run(scenario())
    assert "No request was served" in (tmp_path / "page.html").read_text()
