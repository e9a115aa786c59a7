"""Which streams count as served, on scripted servers that fail in every way."""

import asyncio
import itertools
import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.load.config import ApiKind
from sluice.load.stream import EventSplitter
from tests.load.scripted_server import Script, Wire, good_stream, only_failure, run_against


def test_a_good_stream_is_served() -> None:
    (result,) = run_against(good_stream).results
    assert result.failure is None
    assert (result.output_tokens, result.output_tokens_counted_by, result.prompt_tokens) == (3, "usage", 7)
    assert len(result.event_times_s) == 3
    assert result.finish_reason == "length"


def stream(*sent: str | bytes | int | dict[str, Any], is_ended: bool = True) -> Script:
    """Send tokens of these texts, and events of other contents; a number ends the stream and says how many it had."""

    async def script(wire: Wire) -> None:
        wire.start_stream()
        for each in sent:
            match each:
                case str():
                    wire.token(each)
                case int():
                    wire.finish(each)
                case _:
                    wire.event(each)
        if is_ended and not isinstance(sent[-1], int):
            wire.end_stream()

    return script


def test_tokens_merged_into_one_event_are_counted_by_usage() -> None:
    (result,) = run_against(stream("two tokens", "one", 3)).results
    assert result.failure is None
    assert (result.output_tokens, len(result.event_times_s)) == (3, 2)


def without_usage(finish_reason: str) -> Script:
    return stream("a", {"choices": [{"text": "rest", "finish_reason": finish_reason}]}, b"[DONE]")


def test_without_usage_the_finish_reason_is_trusted_and_events_are_counted() -> None:
    (result,) = run_against(without_usage("length")).results
    assert result.failure is None
    assert (result.output_tokens, result.output_tokens_counted_by) == (2, "events")


SHORT = stream("a", 2)
DIED: dict[str, Any] = {"error": {"message": "engine died", "type": "server_error"}}
TRITON: dict[str, Any] = {"api": ApiKind.GENERATE_STREAM}
PIECE = {"model_name": "m", "model_version": "1", "text_output": "a"}


def test_fewer_tokens_are_fine_where_the_model_may_stop_by_itself() -> None:
    assert run_against(SHORT, ignore_eos=False).summary.num_served == 1


async def error_event_then_close(wire: Wire) -> None:
    wire.start_stream()
    wire.event(DIED)
    await wire.writer.drain()
    wire.writer.close()


async def cut_inside_an_event(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"text_output": "abc", "num_output_tokens": 3})
    wire.send(b'data: {"text_out')
    wire.end_stream()


async def refused(wire: Wire) -> None:
    await wire.whole("429 Too Many Requests", b'{"error": {"message": "queue full"}}', "Retry-After: 1")


async def reset(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    await wire.writer.drain()
    wire.reset()


async def never_ends(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    await asyncio.Event().wait()


async def without_results(wire: Wire) -> None:
    await wire.whole("200 OK", b"{}")


FAILURES: dict[str, tuple[Script, dict[str, Any], str, str]] = {
    "fewer tokens than asked": (SHORT, {}, "short", "2 of 3 tokens, counted by usage"),
    "fewer, without usage": (without_usage("stop"), {}, "short", ""),
    "an error event before a clean end": (stream("a", DIED, b"[DONE]"), {}, "error_event", "engine died"),
    "an error event before a broken connection": (error_event_then_close, {}, "error_event", "engine died"),
    "no [DONE]": (stream("a", "a", "a", {"choices": [], "usage": {"completion_tokens": 3}}), {}, "no_terminator", ""),
    "an end inside an event": (cut_inside_an_event, TRITON, "no_terminator", "ended inside an event"),
    "an event that is no JSON": (stream(b"{oops", 3), {}, "malformed", ""),
    "a status other than 200": (refused, {}, "http_429", "queue full"),
    "a connection that is reset": (reset, {}, "connection", ""),
    "a stream that never ends": (never_ends, {"timeout_s": 0.05}, "timeout", ""),
    "fewer events of generate_stream": (stream(PIECE, PIECE), TRITON, "short", ""),
    "an error event of generate_stream": (
        stream(PIECE, {"error": "asked to fail"}, PIECE, PIECE),
        TRITON,
        "error_event",
        "asked to fail",
    ),
    "a whole answer without results": (without_results, {"api": ApiKind.EMBEDDINGS}, "error_event", ""),
}


@pytest.mark.parametrize(("script", "settings", "label", "detail"), FAILURES.values(), ids=FAILURES)
def test_what_is_a_failure(script: Script, settings: dict[str, Any], label: str, detail: str) -> None:
    failure = only_failure(script, **settings)
    assert failure.label == label and detail in failure.detail


def test_generate_stream_ends_with_the_body_and_counts_events() -> None:
    assert run_against(stream(PIECE, PIECE, PIECE), **TRITON).summary.num_served == 1


async def ollama_lines(wire: Wire) -> None:
    """Send lines of JSON that the network cuts anywhere."""
    tokens = [{"message": {"content": "a"}, "done": False}] * 3
    lines = [*tokens, {"done": True, "eval_count": 3, "done_reason": "length"}]
    body = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
    wire.start_stream()
    for start in range(0, len(body), 10):
        wire.send(body[start : start + 10])
        await wire.writer.drain()
    wire.end_stream()


def test_lines_of_json_are_events() -> None:
    (result,) = run_against(ollama_lines, api=ApiKind.OLLAMA_CHAT).results
    assert result.is_ok
    assert (len(result.event_times_s), result.output_tokens, result.finish_reason) == (3, 3, "length")


def test_an_answer_that_is_not_streamed_has_an_end_and_no_first_token() -> None:
    async def script(wire: Wire) -> None:
        await wire.whole("200 OK", b'{"data": [{"embedding": [0.1]}], "usage": {"prompt_tokens": 5}}')

    (result,) = run_against(script, api=ApiKind.EMBEDDINGS).results
    assert result.is_ok
    assert (result.ttft_s, result.prompt_tokens) == (None, 5)
    assert result.e2e_s > 0


def test_a_client_that_leaves_drops_its_connection_and_counts_neither_as_served_nor_as_failed() -> None:
    gone = []

    async def script(wire: Wire) -> None:
        wire.start_stream()
        wire.token()
        with suppress(ConnectionError):
            while True:
                await wire.writer.drain()
                wire.token()
                await asyncio.sleep(0)
        gone.append(wire.index)

    run = run_against(script, cancelled_share=1.0, num_requests=4, concurrency=2)
    assert [result.has_left for result in run.results] == [True] * 4
    assert (run.summary.num_left, run.summary.num_served, run.summary.num_failed) == (4, 0, 0)
    assert len(gone) >= 2


STREAM = (
    b': ping\n\ndata: {"a":1}\n\ndata:{"b":2}\n\nevent: x\nid: 4\ndata: one\ndata: two\n\nevent: y\n\ndata: [DONE]\n\n'
)
EVENTS = [b'{"a":1}', b'{"b":2}', b"one\ntwo", b"[DONE]"]


def feed_all(pieces: list[bytes]) -> list[bytes]:
    splitter = EventSplitter()
    events = [event for piece in pieces for event in splitter.feed(piece)]
    assert splitter.is_between_events
    return events


@given(st.lists(st.integers(0, len(STREAM))), st.booleans())
def test_events_do_not_depend_on_where_the_network_cuts(cuts: list[int], has_carriage_returns: bool) -> None:
    stream = STREAM.replace(b"\n", b"\r\n") if has_carriage_returns else STREAM
    borders = [0, *sorted(cuts), len(stream)]
    assert feed_all([stream[a:b] for a, b in itertools.pairwise(borders)]) == EVENTS


def test_a_cut_event_is_not_between_events() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert not splitter.is_between_events
