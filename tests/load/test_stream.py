"""Which streams count as served, on scripted servers that fail in every way."""

import asyncio
import itertools
import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from load.config import ApiKind
from load.splitters import EventSplitter
from load.stream import Failure, FailureKind
from tests.load.scripted_server import Wire, good_stream, only_failure, run_against


def test_a_good_stream_is_served() -> None:
    (result,) = run_against(good_stream).results
    assert result.failure is None
    assert (result.output_tokens, result.output_tokens_counted_by, result.prompt_tokens) == (3, "usage", 7)
    assert len(result.event_times_s) == 3
    assert result.finish_reason == "length"


async def merged(wire: Wire) -> None:
    wire.start_stream()
    wire.token("two tokens")
    wire.token("one")
    wire.finish(3)


def test_tokens_merged_into_one_event_are_counted_by_usage() -> None:
    (result,) = run_against(merged).results
    assert result.failure is None
    assert (result.output_tokens, len(result.event_times_s)) == (3, 2)


async def short(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    wire.finish(2)


def test_fewer_tokens_than_asked_is_a_failure() -> None:
    assert only_failure(short) == Failure(FailureKind.SHORT, "2 of 3 tokens, counted by usage")


def test_fewer_tokens_are_fine_where_the_model_may_stop_by_itself() -> None:
    assert run_against(short, ignore_eos=False).summary.num_served == 1


async def silent_about_usage(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    wire.event({"choices": [{"text": "rest", "finish_reason": "stop" if wire.body["seed"] else "length"}]})
    wire.event(b"[DONE]")
    wire.end_stream()


def test_without_usage_the_finish_reason_decides_whether_a_stream_is_short() -> None:
    (trusted,) = run_against(silent_about_usage, extra_body={"seed": 0}).results
    assert trusted.failure is None
    assert (trusted.output_tokens, trusted.output_tokens_counted_by) == (2, "events")
    assert only_failure(silent_about_usage, extra_body={"seed": 1}).kind is FailureKind.SHORT


async def error_event(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    wire.event({"error": {"message": "engine died", "type": "server_error"}})
    wire.event(b"[DONE]")
    wire.end_stream()


def test_an_error_event_is_a_failure_even_before_a_clean_end() -> None:
    assert only_failure(error_event) == Failure(FailureKind.ERROR_EVENT, "engine died")


async def error_event_then_reset(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"error": {"message": "engine died"}})
    await wire.writer.drain()
    wire.writer.close()


def test_what_the_server_said_comes_before_how_the_connection_ended() -> None:
    assert only_failure(error_event_then_reset) == Failure(FailureKind.ERROR_EVENT, "engine died")


async def no_terminator(wire: Wire) -> None:
    wire.start_stream()
    for _ in range(3):
        wire.token()
    wire.usage(3)
    wire.end_stream()


def test_a_stream_without_done_is_a_failure() -> None:
    assert only_failure(no_terminator).kind is FailureKind.NO_TERMINATOR


async def cut_inside_an_event(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"text_output": "abc", "num_output_tokens": 3})
    wire.send(b'data: {"text_out')
    wire.end_stream()


def test_an_end_inside_an_event_is_a_failure() -> None:
    failure = only_failure(cut_inside_an_event, api=ApiKind.GENERATE_STREAM)
    assert failure == Failure(FailureKind.NO_TERMINATOR, "ended inside an event")


async def malformed(wire: Wire) -> None:
    wire.start_stream()
    wire.event(b"{oops")
    wire.finish(3)


def test_an_event_that_is_not_json_is_a_failure() -> None:
    assert only_failure(malformed).kind is FailureKind.MALFORMED


async def refused(wire: Wire) -> None:
    await wire.whole("429 Too Many Requests", b'{"error": {"message": "queue full"}}', "Retry-After: 1")


def test_a_status_other_than_200_is_a_failure_counted_by_status() -> None:
    failure = only_failure(refused)
    assert failure.label == "http_429"
    assert "queue full" in failure.detail


async def reset(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    await wire.writer.drain()
    wire.reset()


def test_a_reset_connection_is_a_failure() -> None:
    assert only_failure(reset).kind is FailureKind.CONNECTION


async def never_ends(wire: Wire) -> None:
    wire.start_stream()
    wire.token()
    await asyncio.Event().wait()


def test_a_stream_that_never_ends_times_out() -> None:
    assert only_failure(never_ends, timeout_s=0.05).kind is FailureKind.TIMEOUT


async def triton(wire: Wire) -> None:
    wire.start_stream()
    for _ in range(wire.body["max_tokens"] - wire.body["missing"]):
        wire.event({"model_name": "m", "model_version": "1", "text_output": "a"})
    wire.end_stream()


@pytest.mark.parametrize(("missing", "num_served"), [(0, 1), (1, 0)])
def test_generate_stream_ends_with_the_body_and_counts_events(missing: int, num_served: int) -> None:
    run = run_against(triton, api=ApiKind.GENERATE_STREAM, extra_body={"missing": missing})
    assert run.summary.num_served == num_served


async def triton_error(wire: Wire) -> None:
    wire.start_stream()
    wire.event({"text_output": "a"})
    wire.event({"error": "asked to fail"})
    wire.event({"text_output": "b"})
    wire.event({"text_output": "c"})
    wire.end_stream()


def test_generate_stream_error_event() -> None:
    assert only_failure(triton_error, api=ApiKind.GENERATE_STREAM) == Failure(FailureKind.ERROR_EVENT, "asked to fail")


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


def test_a_whole_answer_without_results_is_a_failure() -> None:
    async def script(wire: Wire) -> None:
        await wire.whole("200 OK", b"{}")

    assert only_failure(script, api=ApiKind.EMBEDDINGS).kind is FailureKind.ERROR_EVENT


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


def test_one_event_a_piece() -> None:
    assert feed_all([b"data: a\n\n", b"data: b\n\n"]) == [b"a", b"b"]


def test_a_cut_event_is_not_between_events() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n") == [b"a"]
    assert not splitter.is_between_events
