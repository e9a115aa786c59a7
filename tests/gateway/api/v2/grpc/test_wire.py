"""gRPC as it is on the wire: what clients of the grpc package never send, and what they could not show."""

from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from sluice.gateway.api.v2.grpc import wire
from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.grpc.http2.calls import ECHO, HELD, STREAM, serving_calls
from tests.gateway.api.v2.grpc.http2.client import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    answer,
    connected,
    frame,
    message,
    request_fields,
    reset,
)
from tests.gateway.api.v2.grpc.parts import HeldModel, infer_request, serving
from tests.gateway.api.v2.small_service import SmallService

DEADLINE, TOO_LONG, UNIMPLEMENTED, INTERNAL = 4, 8, 12, 13
INFER = "/inference.GRPCInferenceService/ModelInfer"


def changed(name: str, value: str) -> list[tuple[str, str]]:
    return [(each, value if each == name else given) for each, given in request_fields()]


# --- the head ---

ACCEPTED = "identity, deflate, gzip"
NO_CALL = "this port speaks gRPC"
TIMEOUT = "grpc-timeout is up to 8 digits and a unit of HMSmun, got {!r}"
REFUSED: dict[str, tuple[list[tuple[str, str]], str, str, str]] = {
    **{
        f"content-type {kind!r}": (changed("content-type", kind), "415", "3", repr(kind))
        for kind in ("application/json", "application/grpc-web", "application/grpcx", "")
    },
    "no content-type": ([each for each in request_fields() if each[0] != "content-type"], "415", "3", NO_CALL),
    "GET": (changed(":method", "GET"), "415", "3", "GET"),
    **{
        f"path {path!r}": (changed(":path", path), "200", "12", "Method not found!")
        for path in ("/unknown", "/test/Unknown", "no slash", "/test/Echo/")
    },
    "an unknown encoding": (
        request_fields(more=[("grpc-encoding", "br")]),
        "200",
        "12",
        f"grpc-encoding 'br' is not known here, use one of {ACCEPTED}",
    ),
    **{
        f"timeout {text!r}": (request_fields(more=[("grpc-timeout", text)]), "200", "3", TIMEOUT.format(text))
        for text in ("", "soon", "-1S", "123456789S")
    },
    "metadata that are no base64": (
        request_fields(more=[("x-bin", "a?b")]),
        "200",
        "3",
        "the metadata x-bin must be base64, got 'a?b'",
    ),
}


@pytest.mark.parametrize(("fields", "status", "code", "words"), REFUSED.values(), ids=REFUSED)
async def test_heads_that_are_refused(fields: list[tuple[str, str]], status: str, code: str, words: str) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        [block] = (await answer(client, fields, message(b"x"))).blocks
        assert (block[":status"], block["grpc-status"], block["content-type"]) == (status, code, "application/grpc")
        assert words in block["grpc-message"] and (status == "200" or NO_CALL in block["grpc-message"])
        assert ("grpc-accept-encoding" in block) == ("encoding" in words)
        assert (await client.ask(101)).messages == [b"hello"]


async def test_content_types() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        for kind in ("application/grpc", "application/grpc+proto", "Application/gRPC ; charset=utf-8"):
            found = await answer(client, changed("content-type", kind), message(b"x"))
            assert (found.status, found.messages) == (0, [b"x"])
            told = {":status": "200", "content-type": "application/grpc", "grpc-accept-encoding": ACCEPTED}
            assert found.blocks[0] == told


# --- timeouts ---


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1H", 3600.0),
        ("2M", 120.0),
        ("3S", 3.0),
        ("4m", 0.004),
        ("5u", 5e-6),
        ("6n", 6e-9),
        ("99999999H", 99999999 * 3600.0),
        ("007S", 7.0),
        *((bad, None) for bad in ("", "S", "1", "1s", "1 S", "-1S", "+1S", "1.5S", "100000000S", "1SS", "１S", "1_0S")),
    ],
)
def test_timeouts_are_read(text: str, seconds: float | None) -> None:
    assert wire.parse_timeout(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("is_sent", [True, False], ids=["complete", "without its message"])
async def test_the_server_itself_keeps_to_a_deadline(is_sent: bool) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.headers(1, HELD, [("grpc-timeout", "30m")]))
        if is_sent:
            client.send(frame(DATA, END_STREAM, 1, message(b"x")))
        ended = await client.end_of(1)
        assert (ended.status, ended.blocks[-1]["grpc-message"]) == (DEADLINE, "Deadline Exceeded")
        await calls.until_idle()
        assert (calls.num_held, calls.num_cancelled) == (0, calls.num_begun)


async def test_a_deadline_amid_a_response_that_nobody_takes() -> None:
    async with serving_calls() as calls, connected(calls.port, {4: 0}) as client:
        client.send(client.request(1, ECHO, b"x", [("grpc-timeout", "50m")]))
        ended = await client.end_of(1)
        assert ended.reset == 8 and not ended.data
        await calls.until_idle()


async def test_a_call_that_is_reset_is_cancelled() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.request(1, HELD))
        client.send(client.request(3, ECHO))
        await client.end_of(3)
        assert calls.num_held == 1
        client.send(reset(1))
        await calls.until_idle()
        assert (calls.num_held, calls.num_cancelled) == (0, 1)
        client.send(client.headers(5, HELD), reset(5))  # before its handler has begun
        assert (await client.ask(7)).status == 0
        await calls.until_idle()


# --- messages ---


async def test_many_messages_in_one_frame_and_one_in_many() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        whole = b"".join(message(each) for each in (b"", b"a", b"", b"bc", b"d" * 1000))
        together = await answer(client, request_fields(STREAM), whole)
        apart = await answer(client, request_fields(STREAM), *(bytes([each]) for each in whole))
        assert together.messages == apart.messages == [b"", b"a", b"", b"bc", b"d" * 1000]
        for cut in range(1, 12):
            split = await answer(client, request_fields(STREAM), whole[:cut], whole[cut:])
            assert split.messages == together.messages


ONE = message(infer_request("held", 1).SerializeToString())
LIVE = "/inference.GRPCInferenceService/ServerLive"


@pytest.mark.parametrize("path", [ECHO, INFER])
@pytest.mark.parametrize("number", [0, 2, 5000])
async def test_other_than_one_message_in_a_unary_call(path: str, number: int) -> None:
    model = HeldModel()
    async with (
        serving_calls() as calls,
        serving(SmallService(model)) as running,
        connected(calls.port if path == ECHO else running.port) as client,
    ):
        ended = await answer(client, request_fields(path), *[ONE] * number)
    assert ended.status == UNIMPLEMENTED
    text, _, found = ended.blocks[-1]["grpc-message"].rpartition(" ")
    assert text == f"{path} takes one message, got" and min(number, 2) <= int(found) <= number
    assert not model.jobs


@pytest.mark.parametrize(
    ("last", "status"),
    [(frame(DATA, 0, 1, ONE), UNIMPLEMENTED), (frame(DATA, END_STREAM, 1, b"\0\xff\xff\xff\xff"), TOO_LONG)],
    ids=["a second message, before the end", "a last frame that is refused"],
)
async def test_nothing_is_inferred_for_a_call_that_ends_wrongly(last: bytes, status: int) -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running, connected(running.port) as client:
        client.send(client.headers(1, INFER), frame(DATA, 0, 1, ONE), last)
        assert (await client.end_of(1)).status == status
        assert (await client.ask(3, LIVE, b"")).status == 0
        assert not model.jobs


@pytest.mark.parametrize("path", [ECHO, STREAM, INFER])
async def test_a_message_that_is_cut_short(path: str) -> None:
    async with serving_calls() as calls, serving(SmallService()) as running:
        async with connected(running.port if path == INFER else calls.port) as client:
            for lacking in (1, 4, 7):
                ended = await answer(client, request_fields(path), message(b"abc")[:-lacking])
                assert (ended.status, ended.blocks[-1]["grpc-message"]) == (INTERNAL, "the last message is cut short")
        await calls.until_idle()


@pytest.mark.parametrize("flag", [2, 0x80, 0xFF])
async def test_flags_of_a_message_that_there_are_not(flag: int) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        assert (await answer(client, request_fields(), message(b"x", flag))).reset == 1
        assert (await client.ask(101)).status == 0


async def test_a_message_that_is_too_long() -> None:
    """It is refused for its prefix alone, in a frame that may be the last one."""
    async with serving_calls(GrpcOptions(port=0, max_input_bytes=1000)) as calls, connected(calls.port) as client:
        assert (await answer(client, request_fields(), message(bytes(1000)))).status == 0
        for data in ([message(bytes(1001))], [message(bytes(1001))[:5]], [b"\0\xff", b"\xff\xff\xff"]):
            ended = await answer(client, request_fields(), *data)
            size = int.from_bytes(b"".join(data)[1:5])
            text = f"SERVER: Received message larger than max ({size} vs. 1000)"
            assert (ended.status, ended.blocks[-1]["grpc-message"]) == (TOO_LONG, text)
        client.send(client.headers(101), frame(DATA, END_STREAM, 101, message(bytes(2000))))
        assert (await client.end_of(101)).status == TOO_LONG
        await calls.until_idle()


# --- texts and metadata ---


@pytest.mark.parametrize(
    "text",
    ["", "plain", "100 % sure", "two\nlines\tand\0", "naïve", "日本語", "😀", "x" * 4096, "é" * 600, '"quoted" \\ ~'],
)
def test_texts_of_statuses(text: str) -> None:
    sent = wire.encode_message(text)
    assert sent.isascii() and all(0x20 <= byte < 0x7F for byte in sent)
    assert unquote(sent.decode()) == text


@pytest.mark.parametrize("letter", ["x", "é", "語", "😀", "%", "\n"])
def test_very_long_texts_are_cut_between_letters(letter: str) -> None:
    for begin in ("", "a", "ab", "abc"):
        sent = wire.encode_message(begin + letter * 5000)
        assert wire.MAX_MESSAGE_BYTES - 12 < len(sent) <= wire.MAX_MESSAGE_BYTES + 3
        found = unquote(sent.decode(), errors="strict")
        assert found.endswith("...") and found.removeprefix(begin).removesuffix("...").strip(letter) == ""


async def test_metadata_as_clients_may_write_them() -> None:
    found: list[Any] = []

    async def note(raw: bytes, context: Any) -> bytes:
        found.extend(context.invocation_metadata())
        return b""

    given = [
        ("x-a", "1"),
        ("x-a", "2"),
        ("x-empty", ""),
        ("x-bin", "AAEC"),
        ("x-bin", "/w"),
        ("x-bin", "/w=="),
        ("x-joined-bin", "AQ,Ag==, Aw"),
        ("user-agent", "a test"),
    ]
    handlers = {"/test/Note": grpc.unary_unary_rpc_method_handler(note)}
    async with serving_calls(more=handlers) as calls, connected(calls.port) as client:
        assert (await answer(client, request_fields("/test/Note", given), message(b""))).status == 0
    assert found == [
        ("x-a", "1"),
        ("x-a", "2"),
        ("x-empty", ""),
        ("x-bin", b"\0\1\2"),
        ("x-bin", b"\xff"),
        ("x-bin", b"\xff"),
        ("x-joined-bin", b"\1"),
        ("x-joined-bin", b"\2"),
        ("x-joined-bin", b"\3"),
        ("user-agent", "a test"),
    ]


async def test_a_response_s_fields_that_are_too_long_for_a_frame() -> None:
    async def fail(raw: bytes, context: Any) -> None:
        await context.abort(grpc.StatusCode.DATA_LOSS, "long", (("x-long", "v" * 40_000),))

    handlers = {"/test/Fail": grpc.unary_unary_rpc_method_handler(fail)}
    async with serving_calls(more=handlers) as calls, connected(calls.port) as client:
        kept = client.keep_frames()
        client.send(client.request(1, "/test/Fail"))
        await client.until(lambda: [kind for kind, *_ in kept][-1:] == [CONTINUATION] and kept[-1][1] & END_HEADERS > 0)
        of_block = [each for each in kept if each[0] in (HEADERS, CONTINUATION)]
        assert [len(each[2]) for each in of_block[:-1]] == [16_384, 16_384]
        block = b"".join(each[2] for each in of_block)
        fields = {str(name): str(value) for name, value in client.decoder.decode(block)}
        assert (fields["grpc-status"], fields["x-long"]) == ("15", "v" * 40_000)
