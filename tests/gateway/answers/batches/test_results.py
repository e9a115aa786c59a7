"""What a process that was killed leaves in the files of results."""

import asyncio
import json
import os
from pathlib import Path

import pytest

from sluice.gateway.answers.batches.records import ResultCounts
from sluice.gateway.answers.batches.results import BatchResult, ResultFiles


def answered(custom_id: str, status: int = 200) -> BatchResult:
    return BatchResult.answered(custom_id, status, "request", b'{"n":1}')


def files(folder: Path) -> ResultFiles:
    return ResultFiles(folder / "output", folder / "errors")


async def write(folder: Path, *results: BatchResult) -> ResultFiles:
    """Write results at the same time, and close the files."""
    opened = files(folder)
    await opened.open()
    await asyncio.gather(*map(opened.add, results))
    await opened.close()
    return opened


async def test_a_line_without_its_end_is_written_again(tmp_path: Path) -> None:
    written = await write(tmp_path, *(answered(f"r{i}") for i in range(20)), answered("bad", 400))
    assert written.counts == ResultCounts(20, 1)
    whole = (tmp_path / "output").read_bytes()
    for length in (len(whole) - 1, len(whole) - 40, whole.index(b"\n") + 1, 3, 0):
        (tmp_path / "output").write_bytes(whole[:length])
        again = files(tmp_path)
        await again.open()
        num_whole = whole[:length].count(b"\n")
        assert again.counts == ResultCounts(num_whole, 1) and len(again.finished) == num_whole + 1
        assert (tmp_path / "output").read_bytes() == b"".join(whole.splitlines(keepends=True)[:num_whole])
        await again.add(*(answered(f"r{i}") for i in range(20) if f"r{i}" not in again.finished))
        await again.close()
        ids = [json.loads(line)["custom_id"] for line in (tmp_path / "output").read_text().splitlines()]
        assert sorted(ids) == sorted(f"r{i}" for i in range(20))


async def test_a_file_without_lines_does_not_stay(tmp_path: Path) -> None:
    await write(tmp_path, answered("r1"))
    assert os.listdir(tmp_path) == ["output"]


async def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    first = files(tmp_path)
    await first.open()
    with pytest.raises(OSError, match="another process writes"):
        await files(tmp_path).open()
    await first.close()


@pytest.mark.parametrize("text", ["notes\n", "notes", '{"id":"other"', '{"id":7}\n'])
async def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, text: str) -> None:
    (tmp_path / "output").write_text(text)
    opened = files(tmp_path)
    with pytest.raises(ValueError, match=r"line 1 of .*output is no result of a batch"):
        await opened.open()
    await opened.close()
    assert (tmp_path / "output").read_text() == text


async def test_after_a_failure_nothing_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even what was written: whether it was is known when the files are opened again."""
    opened = files(tmp_path)
    await opened.open()
    monkeypatch.setattr("os.fdatasync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    outcomes = await asyncio.gather(*(opened.add(answered(f"r{i}")) for i in range(3)), return_exceptions=True)
    assert [type(each) for each in outcomes] == [OSError] * 3 and not opened.finished
    monkeypatch.undo()
    with pytest.raises(OSError, match="No space"):
        await opened.add(answered("r9"))
    await opened.close()
    again = files(tmp_path)
    await again.open()
    assert "r9" not in again.finished
    await again.close()
