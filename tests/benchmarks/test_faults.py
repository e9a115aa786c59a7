"""The benchmark of faults without servers: how it names ends of streams and answers, and its tables."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.faults.catalogue import SERVERS
from benchmarks.faults.client import CUT, ERROR, HUNG, SHORT, WHOLE, HealthWatch, Stream
from benchmarks.faults.findings import Finding, Record, read_records, render, tally, write_record
from benchmarks.faults.garbage import describe_answer
from benchmarks.faults.run import FAULTS, choose
from benchmarks.faults.server import sum_metric
from benchmarks.figures import BenchmarkError


def _event(text: str = "", finish_reason: str | None = None) -> str:
    return f"data: {json.dumps({'choices': [{'index': 0, 'text': text, 'finish_reason': finish_reason}]})}\n\n"


async def _read(answer: Callable[[httpx.Request], httpx.Response]) -> Stream:
    stream = Stream({}, enough=2)
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://server") as client:
        await stream.read(client)
    assert stream.is_under_way.is_set(), "nobody may wait for a stream that has ended"
    return stream


def _raise(error: httpx.TransportError) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error

    return answer


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (_event("a") + _event("b", "length") + "data: [DONE]\n\n", WHOLE),
        (_event("a") + _event("b") + _event("", "length"), WHOLE),
        (_event("a") + "data: [DONE]\n\n", SHORT),
        (_event("a", "abort") + "data: [DONE]\n\n", SHORT),
        (_event("a") + 'data: {"error": {"message": "the engine is gone"}}\n\ndata: [DONE]\n\n', ERROR),
    ],
)
async def test_ends_of_a_stream(body: str, end: str) -> None:
    stream = await _read(lambda request: httpx.Response(200, text=body))
    assert stream.end == end
    assert stream.text == "".join(text for text in "ab" if f'"text": "{text}"' in body)


async def test_what_is_no_stream() -> None:
    refused = await _read(lambda request: httpx.Response(429, text="full", headers={"retry-after": "2"}))
    assert (refused.end, refused.retry_after, refused.detail) == ("status 429", "2", "full")
    assert (await _read(_raise(httpx.ReadTimeout("slow")))).end == HUNG
    assert (await _read(_raise(httpx.RemoteProtocolError("gone")))).end == CUT


def test_the_longest_pause_since_a_moment() -> None:
    stream = Stream({}, times_s=[1.0, 4.0, 5.0, 7.0])
    assert stream.longest_pause_s() == 3.0
    assert stream.longest_pause_s(since_s=4.5) == 2.0
    assert Stream({}).longest_pause_s() == 0.0


def test_health_over_time() -> None:
    server: Any = None
    watch = HealthWatch(server, changes=[(1.0, "200"), (10.5, "503"), (12.0, "200")])
    assert watch.told_after_s(10.0) == 0.5
    assert watch.course(10.0) == "200, 503 at 0.5 s, 200 at 2.0 s"
    assert watch.told_after_s(13.0) is None
    assert watch.course(13.0) == "200"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"", "closed without an answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "200"),
        (b'HTTP/1.1 400 Bad Request\r\n\r\n{"error":{"message":"no"}}', "400 OpenAI's error"),
        (b'HTTP/1.1 400 Bad Request\r\n\r\n1a\r\n{"error":{"message":"no"}}\r\n0\r\n\r\n', "400 OpenAI's error"),
        (b'HTTP/1.1 422 Unprocessable\r\n\r\n{"detail":[]}', "422 other JSON"),
        (b'HTTP/1.1 422 Unprocessable\r\n\r\n["no"]', "422 text"),
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\nInternal Server Error", "500 text"),
        (b"HTTP/1.1 413 Too Large\r\n\r\n", "413 empty"),
    ],
)  # fmt: skip
def test_answers_to_garbage(answer: bytes, found: str) -> None:
    assert describe_answer(answer) == found


def test_a_metric_is_summed_over_its_labels() -> None:
    page = '# TYPE running gauge\nrunning{model="a"} 2.0\nrunning{model="b"} 1\nrunning_total 9\nfree 4\n'
    assert sum_metric(page, "running") == 3
    assert sum_metric(page, "free") == 4
    assert sum_metric(page, "waiting") is None


def test_tables_of_what_was_measured(tmp_path: Path) -> None:
    ours = (Finding("until idle", 0.25, "s"), Finding("/health", "200 | 503"))
    theirs = (Finding("until idle", 12.0, "s"), Finding("tokens", 1234.0))
    for server, findings in (("vLLM", theirs), ("Sluice", ours), ("Sluice", ours)):
        write_record(tmp_path, Record("kill -9", server, "1.0", "now", findings))
    records = read_records(tmp_path)
    assert len(records) == 2
    assert render(records, ["no such", "kill -9"], ["Sluice", "vLLM", "other"]).splitlines() == [
        "### kill -9",
        "",
        "|  | Sluice 1.0 | vLLM 1.0 |",
        "| --- | --- | --- |",
        "| until idle | 0.25 s | 12 s |",
        "| /health | 200 \\| 503 |  |",
        "| tokens |  | 1,234 |",
    ]
    assert [figure.median for record in records for figure in record.figures()] == [0.25, 12.0, 1234.0]


def test_tallies() -> None:
    assert tally([WHOLE, ERROR, WHOLE]) == "2 whole, 1 error event"
    assert tally([]) == "none"


def test_what_only_names() -> None:
    assert choose("") == (list(FAULTS), list(SERVERS))
    assert choose("vllm killed sluice") == (["killed"], ["sluice", "vllm"])
    with pytest.raises(BenchmarkError, match="no vlm; there are"):
        choose("vlm")
