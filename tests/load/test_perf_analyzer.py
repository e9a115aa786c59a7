"""perf_analyzer's command lines, on a real server with small models."""

import csv
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.load.__main__ import command
from sluice.load.compatible.perf_analyzer import LevelRange, ServerSplit, bottleneck
from sluice.load.config import LoadConfigError
from tests.gateway.http.v2.models import all_models, identity
from tests.gateway.http.v2.small_server import small_server
from tests.gateway.v2.small_service import SmallService
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
    ("text", "levels"), [("4", (4.0,)), ("1:3", (1.0, 2.0, 3.0)), ("1:16:5", (1.0, 6.0, 11.0, 16.0)), ("0.5", (0.5,))]
)
def test_ranges(text: str, levels: tuple[float, ...]) -> None:
    assert LevelRange.parse(text).levels == levels


@pytest.mark.parametrize("text", ["", "a", "0", "4:1", "1:2:0", "1:2:3:4"])
def test_other_ranges_are_refused(text: str) -> None:
    with pytest.raises(LoadConfigError, match=r"write START|must be above 0"):
        LevelRange.parse(text)


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
    assert float(row["Inferences/Second"]) > 0


@pytest.mark.parametrize("tensors", ["binary", "json"])
def test_levels_have_the_columns_of_perf_analyzer(
    tensors: str, host: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "results.csv"
    line = f"-m add_sub -u {host} --concurrency-range 1:2 --request-count 6 --percentile 95 -b 3 -f {file}"
    assert command(["perf-analyzer", *shlex.split(line), "--input-tensor-format", tensors]) == 0
    assert "Concurrency: 2, throughput: " in capsys.readouterr().out
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["Concurrency"] for row in rows] == ["1", "2"]
    assert all(0 < float(row["p50 latency"]) <= float(row["p99 latency"]) for row in rows)


def test_request_rates(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"-m add_sub -u {host} --request-rate-range 50:100:50 --request-count 5 --request-distribution poisson"
    assert command(["perf-analyzer", *shlex.split(line)]) == 0
    printed = capsys.readouterr().out
    assert "Request Rate: 50, throughput: " in printed
    assert "Request Rate: 100, throughput: " in printed


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("-m nowhere", 2, "answers 404"),
        ("-m add_sub --shape INPUT0:5", 2, "--shape INPUT0: got [5], the model expects [-1, 4]"),
        ("-m add_sub -c 1.5", 2, "concurrency 1.5: write a whole number"),
        ("-m error_model --request-count 1", 1, "1 failed"),
    ],
)
def test_what_is_wrong_is_said(
    line: str, status: int, said: str, host: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command(["perf-analyzer", *shlex.split(line), "-u", host]) == status
    printed = capsys.readouterr()
    assert said in printed.err + printed.out
