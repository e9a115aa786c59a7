"""perf_analyzer's command lines, on a real server with small models."""

import csv
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.load.__main__ import command
from sluice.load.perf_analyzer import ServerSplit, bottleneck
from tests.gateway.api.v2.http.models import all_models, identity
from tests.gateway.api.v2.http.small_server import small_server
from tests.gateway.api.v2.small_service import SmallService
from tests.paths import DATA

LINES = tuple(
    line.removeprefix("perf_analyzer ")
    for line in (DATA / "seeds" / "perf_analyzer_lines.sh").read_text().replace("\\\n", "").splitlines()
    if line.startswith("perf_analyzer ")
)
"""The published lines that this command was made for, without the program's name."""
DEFAULT_ENDPOINT = "localhost:8000"
SHORTER = {"--duration-ms 60000": "--duration-ms 300", "-d 60": "-d 1"}


@pytest.mark.parametrize(
    ("split", "latency_ms", "said"),
    [
        ((5000.0, 10.0, 100.0, 10.0), 6.0, "queue"),
        ((10.0, 10.0, 5000.0, 10.0), 6.0, "computing"),
        ((10.0, 10.0, 100.0, 10.0), 6.0, "outside the model"),
        ((10.0, 3000.0, 100.0, 2000.0), 6.0, "copying"),
    ],
)
def test_the_largest_part_is_the_bottleneck(split: tuple[float, ...], latency_ms: float, said: str) -> None:
    queue, before, compute, after = split
    assert said in bottleneck(ServerSplit(1, queue, before, compute, after, 1.0), latency_ms)


@pytest.fixture(scope="module")
def host() -> Iterator[str]:
    """The host and port of a server with the models that the lines name, and one that fails."""
    named = [identity(name, "TYPE_FP32") for name in ("bert-classifier", "classification-pipeline")]
    with small_server(SmallService(*all_models(), *named)) as running:
        yield running.url.removeprefix("http://")


def test_the_published_lines_are_there() -> None:
    assert [shlex.split(line)[:2] for line in LINES] == [["-m", "bert-classifier"], ["-m", "classification-pipeline"]]


@pytest.mark.parametrize("line", LINES)
def test_published_lines_run_as_printed(
    line: str, host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All is as printed but the times, which are shorter here, and the port, which is a free one."""
    monkeypatch.chdir(tmp_path)
    for printed, shorter in SHORTER.items():
        line = line.replace(printed, shorter)
    where = [] if DEFAULT_ENDPOINT in line else ["-u", host]
    assert command(["perf-analyzer", *shlex.split(line.replace(DEFAULT_ENDPOINT, host)), *where]) == 0
    assert "Request concurrency: 100\n" in capsys.readouterr().out
    (row,) = csv.DictReader(Path("results.csv").read_text().splitlines())
    assert row["Concurrency"] == "100" and float(row["Inferences/Second"]) > 0
    assert 0 < float(row["p50 latency"]) <= float(row["p99 latency"])


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("-m nowhere", 2, "answers 404"),
        ("-m add_sub --shape INPUT0:5", 2, "--shape INPUT0: got [5], the model expects [-1, 4]"),
        ("-m error_model --duration-ms 50", 1, " failed\n"),
    ],
)
def test_what_is_wrong_is_said(
    line: str, status: int, said: str, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["perf-analyzer", *shlex.split(line), "-u", host]) == status
    printed = capsys.readouterr()
    assert said in printed.err + printed.out
