import asyncio
import json
from pathlib import Path

import pytest

from sluice.load import compare as compare_command
from sluice.load.__main__ import command
from sluice.load.compare import Report, compare_pairs, compare_reports
from sluice.load.summary import RequestSamples
from tests.load.scripted_server import Script, Wire, good_stream, serving


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
    return {line.split("  ")[0]: next(each for each in (BETTER, WORSE, SAME) if each in line) for line in lines}


WORSE, BETTER, SAME = "B is worse", "B is better", "no difference"


def report_of(values_ms: list[float]) -> Report:
    return Report(
        "a run", len(values_ms), 0, {"TTFT": RequestSamples(values_ms, range(len(values_ms)), len(values_ms))}
    )


@pytest.mark.parametrize(("factor", "verdict"), [(1.5, WORSE), (1 / 1.5, BETTER), (1.0, SAME), (1.02, SAME)])
def test_a_latency_differs_beyond_the_noise_of_its_requests(factor: float, verdict: str) -> None:
    values_ms = [100.0 + each for each in range(24)]
    found = compare_reports(report_of(values_ms), report_of([factor * each for each in values_ms]))
    assert [(each.name, each.verdict) for each in found] == [("TTFT p50, ms", verdict), ("TTFT p99, ms", verdict)]


@pytest.mark.parametrize(
    ("of_b", "is_rate", "verdict"),
    [
        ([11.0, 12.0, 13.0, 11.0, 12.0], False, WORSE),
        ([11.0, 12.0, 13.0, 11.0, 12.0], True, BETTER),
        ([9.0, 8.0, 9.0, 8.0, 9.0], True, WORSE),
        ([9.0, 12.0, 8.0, 12.0, 10.0], False, SAME),
        ([9.0, 8.0, None, 8.0, 9.0], False, None),
    ],
)
def test_a_figure_of_rounds_differs_where_their_ratios_agree(
    of_b: list[float | None], is_rate: bool, verdict: str | None
) -> None:
    found = compare_pairs("figure", [(10.0, each) for each in of_b], is_rate)
    assert (None if found is None else found.verdict) == verdict


def test_a_run_is_no_different_from_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(measure(good_stream, tmp_path / "run"))
    capsys.readouterr()
    assert command(["compare", file, file]) == 0
    assert rows(capsys.readouterr().out)["E2E p50, ms"] == SAME


@pytest.mark.parametrize("content", ["{}", "no JSON", json.dumps({"tool": "sluice load", "requests": 5})])
def test_what_is_no_report_is_named(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.json").write_text(content)
    assert command(["compare", str(tmp_path / "x.json"), str(tmp_path / "x.json")]) == 2
    assert "not a report of `sluice load --json`" in capsys.readouterr().err


def test_two_servers_in_turns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_command, "_PAUSE_S", 0.0)

    async def scenario() -> tuple[int, list[str], list[str]]:
        async with serving(good_stream) as a, serving(good_stream) as b:
            argv = ["ab", "--url-a", a.url, "--url-b", b.url, "--quiet", "--output-tokens", "3", "--num-requests", "4"]
            status = await asyncio.to_thread(command, argv)
            of_a, of_b = ([json.dumps(wire.body["prompt"]) for wire in each.wires] for each in (a, b))
            return status, of_a, of_b

    status, of_a, of_b = asyncio.run(scenario())
    assert status == 0
    assert of_a == of_b
    assert len(set(of_a)) == 20, "each round has requests of its own"
    assert {"TTFT p50, ms", "requests/s"} <= rows(capsys.readouterr().out).keys()


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
