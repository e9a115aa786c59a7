"""What is wrong with the lines of a batch."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.gateway.answers.batches import lines
from sluice.gateway.answers.batches.lines import check_file, pending_lines

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
