"""Lines of requests, and what a process that was killed leaves in the files of results."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest

from sluice.gateway.answers.batches import lines
from sluice.gateway.answers.batches.lines import check_file, pending_lines
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


GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "m", "prompt": "Ü\n", "stream": False},
}


def check(tmp_path: Path, *found: object, max_requests: int = 10) -> list[tuple[str, int | None, str | None]]:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"\n".join(each if isinstance(each, bytes) else json.dumps(each).encode() for each in found))
    return [(each.code, each.line, each.param) for each in check_file(path, max_requests, "/v1/completions").problems]


@pytest.mark.parametrize(
    ("line", "code", "param"),
    [
        (b"{", "invalid_json_line", None),
        (b"[1]", "invalid_type", None),
        (b"\xff\xfe{}", "invalid_json_line", None),
        (b'{"custom_id": "\xff"}', "invalid_type", "custom_id"),
        (b"[" * 100_000, "invalid_type", None),
        ({**GOOD, "custom_id": 7}, "invalid_type", "custom_id"),
        ({**GOOD, "custom_id": ""}, "invalid_value", "custom_id"),
        ({**GOOD, "custom_id": "x" * 513}, "invalid_value", "custom_id"),
        ({**GOOD, "method": "GET"}, "invalid_method", "method"),
        ({**GOOD, "url": "/v1/chat/completions"}, "mismatched_endpoint", "url"),
        ({**GOOD, "body": "x"}, "invalid_type", None),
        ({**GOOD, "body": {}}, "missing_required_parameter", "body.model"),
        ({**GOOD, "body": {"model": "m", "stream": True}}, "invalid_value", "body.stream"),
        ({name: GOOD[name] for name in ("method", "url", "body")}, "missing_required_parameter", "custom_id"),
        (GOOD, "duplicate_custom_id", "custom_id"),
    ],
)
def test_problems_name_line_and_field(tmp_path: Path, line: object, code: str, param: str | None) -> None:
    assert check(tmp_path, GOOD, b"", line, {**GOOD, "custom_id": "b"}) == [(code, 3, param)]


def test_files_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(tmp_path, b"") == [("empty_file", None, None)]
    many = [{**GOOD, "custom_id": str(i)} for i in range(3)]
    assert check(tmp_path, *many, max_requests=2) == [("too_many_requests", None, None)]
    assert len(check(tmp_path, *[b"x"] * 500, max_requests=1000)) == lines.MAX_PROBLEMS
    monkeypatch.setattr(lines, "MAX_LINE_BYTES", 200)
    long = {**GOOD, "body": {"model": "m", "prompt": "x" * 700}}
    assert check(tmp_path, long, {**GOOD, "custom_id": "b"}, b"{") == [
        ("line_too_long", 1, None),
        ("invalid_json_line", 3, None),
    ]


def test_a_body_stays_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    body = b'{ "model":"m","temperature":1.00, "prompt":"\\u00dc" }'
    path.write_bytes(b'\xef\xbb\xbf{"custom_id":"a","method":"POST","url":"/v1/completions","body":' + body + b"}\r\n")
    assert check_file(path, 10, "/v1/completions").problems == []
    assert [line.body for line in pending_lines(path, ())] == [body]
    assert list(pending_lines(path, {"a"})) == []
