"""`sluice usage` over a ledger's file and over a server, in every shape that it writes."""

import asyncio
import csv
import io
import json
import sys
from datetime import date
from pathlib import Path

import pytest

from sluice.cli.usage import command
from sluice.gateway.tenancy.ledger.rows import LedgerRow
from sluice.gateway.tenancy.ledger.store import open_ledger
from tests.gateway.tenancy.ledger.test_stores import DAY, batch, row

RANGE = ("--start", str(DAY), "--end", "2026-03-09")
LATER = date(2026, 3, 2)


@pytest.fixture
def ledger(tmp_path: Path) -> str:
    async def fill() -> None:
        store = open_ledger(str(tmp_path / "ledger.sqlite"))
        rows = [row(), row(), row(LATER, key="k2", model="=m2", first_token_us=None, status=None)]
        await store.write(batch(rows))
        await store.close()

    asyncio.run(fill())
    return str(tmp_path / "ledger.sqlite")


def test_bars_show_each_group_and_the_total(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--ledger", ledger, "--by", "day,key", *RANGE]) == 0
    head, first, second, total = capsys.readouterr().out.splitlines()
    assert head.split() == [
        *("day", "key", "requests", "failed", "prompt_tokens", "cached_tokens", "generated_tokens", "price"),
    ]
    assert first.split() == ["2026-03-01", "name", "of", "k1", "2", "0", "20", "8", "10", "1.4e-05", "█" * 30]
    assert second.rstrip().endswith("█" * 15)
    assert total.split() == ["total", "3", "0", "30", "12", "15", "2.1e-05"]


def test_json_is_the_answer_of_the_server(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--ledger", ledger, "--by", "key", "--json", *RANGE]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(each["key"], each["key_name"], each["requests"]) for each in found["data"]] == [
        ("k1", "name of k1", 2),
        ("k2", "name of k2", 1),
    ]
    assert (found["start"], found["end"], found["total"]["price"]) == ("2026-03-01", "2026-03-09", 0.000021)


def test_csv_is_safe_in_spreadsheets(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--ledger", ledger, "--by", "model", "--csv", *RANGE]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(each["model"], each["requests"]) for each in rows] == [("'=m2", "1"), ("rill", "2")]


def test_requests_are_rows(ledger: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["--ledger", ledger, "--requests", *RANGE]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [LedgerRow(**json.loads(line)) for line in lines][:2] == [row(), row()]
    assert command(["--ledger", ledger, "--requests", "--csv", *RANGE]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_parquet_has_types(ledger: str, tmp_path: Path) -> None:
    arro3 = pytest.importorskip("arro3.io")
    path = tmp_path / "requests.parquet"
    assert command(["--ledger", ledger, "--requests", "--parquet", str(path), *RANGE]) == 0
    table = arro3.read_parquet(path).read_all()
    assert [str(table.schema.field(name).type) for name in ("arrived", "request_id", "status")] == [
        'arro3.core.DataType<Timestamp(µs, "UTC")>\n',
        "arro3.core.DataType<Utf8>\n",
        "arro3.core.DataType<Int64>\n",
    ]
    assert [value.as_py() for value in table["first_token"].combine_chunks()][2] is None
    assert [value.as_py() for value in table["model"].combine_chunks()] == ["rill", "rill", "=m2"]
    assert table["arrived"][0].as_py().date() == DAY
    assert command(["--ledger", ledger, "--parquet", str(path), *RANGE]) == 0
    assert [value.as_py() for value in arro3.read_parquet(path).read_all()["requests"].combine_chunks()] == [2, 1]
    assert [each.name for each in tmp_path.glob("*.part")] == []


@pytest.mark.parametrize("more", [[], ["--requests"]])
def test_a_server_that_is_away_is_one_line(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command([*more, "--url", "http://127.0.0.1:9"]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "cannot be reached" in said.err and said.err.count("\n") == 1


def test_parquet_without_its_extra(
    ledger: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "arro3.io", None)
    assert command(["--ledger", ledger, "--parquet", str(tmp_path / "x"), *RANGE]) == 1
    assert "pip install 'sluice[parquet]'" in capsys.readouterr().err
