"""The access log and the request log: what their lines say, and what clients cannot make them say."""

import asyncio
import json
import os
import re
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.gateway.calls import Call
from sluice.gateway.options.config import read_config
from sluice.gateway.options.option import OptionError
from sluice.gateway.tenancy.access.identity import Identity
from sluice.gateway.tenancy.ledger import logs
from sluice.gateway.tenancy.ledger.logs import (
    MAX_CONTENT_BYTES,
    AccessLog,
    LineWriter,
    Redaction,
    RequestLog,
    RotatingFile,
    StandardOutput,
)
from tests.gateway.front.http.live import MODEL, live_server
from tests.gateway.tenancy.ledger.test_ledger import ended_call

MAIL = r"[\w.]+@[\w.]+"


class Kept:
    """Keeps lines, and raises what `error` is."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.error: Exception | None = None

    def write(self, lines: Sequence[str]) -> None:
        if self.error is not None:
            raise self.error
        self.lines += lines


async def written(log: AccessLog, kept: Kept, *calls: Call) -> list[str]:
    for call in calls:
        log.end(call)
    await log.close()
    return kept.lines


async def test_an_access_line_of_text() -> None:
    kept = Kept()
    call = ended_call(prompt_tokens=7, cached_tokens=2, generated_tokens=8, finish="stop", source="10.0.0.1")
    refused = Call((), "openai", "/v1/models", "r2")
    refused.release()
    first, second = await written(AccessLog(kept, is_json=False), kept, call, refused)
    time = r"\[\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z\]"
    assert re.fullmatch(
        rf'10\.0\.0\.1 ci {time} "openai /v1/x" 200 0 0 0\.\d{{6}} id=req ttft=- prompt=7 cached=2 generated=8 '
        r"model=rill adapter=- finish=stop\n",
        first,
    )
    assert re.fullmatch(rf'- - {time} "openai /v1/models" - 0 0 0\.\d{{6}} id=r2\n', second)


async def test_a_line_names_the_session_and_its_parent() -> None:
    lines = []
    for is_json in (False, True):
        kept = Kept()
        call = ended_call(session="s/a", parent_session="s")
        lines += await written(AccessLog(kept, is_json=is_json), kept, call)
    assert " session=s/a parent_session=s\n" in lines[0]
    assert json.loads(lines[1]).items() >= {"session": "s/a", "parent_session": "s"}.items()


async def test_a_client_cannot_write_a_line_of_its_own() -> None:
    hostile = 'x" 200\n10.0.0.1 admin [\x1b[31m \u2028é'
    for is_json in (False, True):
        kept = Kept()
        call = Call((), "openai", f"/{hostile}", hostile)
        call.identity, call.model, call.adapter = Identity(key_id="k", name=hostile), hostile, hostile
        call.session = call.parent_session = hostile
        call.release()
        [line] = await written(AccessLog(kept, is_json=is_json), kept, call)
        assert len(line.splitlines()) == 1
        assert "\x1b" not in line
        assert line.isascii()
        if is_json:
            assert json.loads(line)["model"] == hostile


async def test_lines_are_lost_and_counted_where_they_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_MAX_WAITING", 3)
    kept = Kept()
    kept.error = OSError("No space left on device")
    log = LineWriter[int]("access", kept, str)
    for number in range(5):
        log.put(number)
    await log.close()
    kept.error = None
    log.put(7)
    await log.close()
    assert kept.lines == ["7\n"]
    [family] = log.collect()
    assert family.samples[0].value == 5
    assert caplog.text.count("No space left on device") == 1


def test_standard_output_takes_long_lines(capfd: pytest.CaptureFixture[str]) -> None:
    StandardOutput().write(["a\n", "é" * 100_000 + "\n"])
    assert capfd.readouterr().out == "a\n" + "é" * 100_000 + "\n"


def test_files_rotate_and_old_ones_go(tmp_path: Path) -> None:
    now = [1_790_000_000.0]
    path = tmp_path / "logs" / "requests.jsonl"
    file = RotatingFile(path, 8000, 2, lambda: now[0])

    def write(size: int) -> list[int]:
        file.write(["x" * (size - 1) + "\n"])
        os.utime(path, (now[0], now[0]))
        return sorted(each.stat().st_size for each in path.parent.iterdir())

    assert write(600) == [600]
    assert write(300) == [900]
    assert write(200) == [200, 900]
    assert path.stat().st_mode & 0o777 == 0o600
    for _ in range(20):
        write(900)
    assert sum(each.stat().st_size for each in path.parent.iterdir()) <= 8000
    now[0] += 3 * 86_400
    assert write(100) == [100]


async def log_of(tmp_path: Path, *, keeps_text: bool = True, patterns: tuple[str, ...] = (MAIL,)) -> RequestLog:
    return RequestLog(RotatingFile(tmp_path / "log", 1 << 20, 1), Redaction(patterns), keeps_text=keeps_text)


async def log_one(log: RequestLog, request: bytes, answer: bytes) -> None:
    call = ended_call()
    await log.begin(call)
    for at in range(0, len(request), 1000):
        call.note_received(request[at : at + 1000])
    call.note_sent(answer)
    log.end(call)
    await log.close()


@pytest.mark.parametrize(
    ("body", "content"),
    [
        (b'{"a": ["me@x.org!", {"b": 1}]}', {"a": ["[redacted]!", {"b": 1}]}),
        (rb'{"me@x.org": "me\u0040x.org"}', {"[redacted]": "[redacted]"}),
        (b"data: {}\n\n", None),
        (b"", None),
        (b"[" * 5000, None),
        (b"[" * 500 + b"]" * 500, None),
        (b'"' + b"x" * MAX_CONTENT_BYTES + b'"', None),
    ],
)
async def test_texts_are_redacted_or_left_out(tmp_path: Path, body: bytes, content: Any) -> None:
    await log_one(await log_of(tmp_path), body, body)
    line = json.loads((tmp_path / "log").read_text())
    assert line["request"] == line["answer"]
    assert (line["request"]["bytes"], line["request"]["sha256"]) == (len(body), sha256(body).hexdigest())
    assert line["request"].get("content") == content


async def test_hashes_alone_are_the_default(tmp_path: Path) -> None:
    await log_one(await log_of(tmp_path, keeps_text=False), b'{"secret": 1}', b"{}")
    assert "secret" not in (tmp_path / "log").read_text()


async def test_a_part_of_the_requests_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chances = iter([0.1, 0.9, 0.2])
    # Only this module's: other threads of the tests draw random numbers too.
    monkeypatch.setattr("sluice.gateway.tenancy.ledger.logs.random", SimpleNamespace(random=lambda: next(chances)))
    log = RequestLog(RotatingFile(tmp_path / "log", 1 << 20, 1), Redaction(()), sample_rate=0.5)
    for model in ("a", "b", ""):
        call = ended_call(model)
        await log.begin(call)
        log.end(call)
    await log.begin(ended_call(group=None))
    await log.close()
    assert [json.loads(line)["model"] for line in (tmp_path / "log").read_text().splitlines()] == ["a"]


@pytest.mark.parametrize(
    ("flag", "value", "problem"),
    [
        ("--request-log-redact", "(", "must be a pattern"),
        ("--request-log-sample-rate", "1.5", "must be a number above 0"),
        ("--request-log-max-size", "10", "must be a size"),
        ("--access-log", "yes", "must be one of off, text, json"),
        ("--ledger", "mysql://x", "must be the path of a file"),
    ],
)
def test_bad_options_are_explained(flag: str, value: str, problem: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{flag} ")) as raised:
        read_config({flag: [value] if flag == "--request-log-redact" else value}, {})
    assert problem in str(raised.value)


def test_bodies_of_real_requests(tmp_path: Path) -> None:
    with live_server() as live:
        log = asyncio.run(log_of(tmp_path))
        live.server.accounts.calls.observe(log)
        live.server.rooms.join(close=log.close)
        body = {"model": MODEL, "prompt": "write to me@x.org", "max_tokens": 2}
        whole = live.post("/v1/completions", body)
        streamed = live.post("/v1/completions", {**body, "stream": True})
        live.get("/v1/models")
        live.wait_idle()
    first, second = map(json.loads, (tmp_path / "log").read_text().splitlines())
    assert first["request"]["content"] == {**body, "prompt": "write to [redacted]"}
    assert first["answer"]["content"]["usage"] == whole.json()["usage"]
    assert first["answer"]["sha256"] == sha256(whole.content).hexdigest()
    assert (second["answer"]["sha256"], second["generated_tokens"]) == (sha256(streamed.content).hexdigest(), 2)
    assert "content" not in second["answer"]
    assert first["operation"] == "/v1/completions"
