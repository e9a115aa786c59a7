"""gRPC as it is on the wire: what clients of the grpc package never send, and what they could not show."""

from typing import Any
from urllib.parse import unquote

import grpc
import pytest

from gateway.grpc import wire
from gateway.options.grpc import GrpcOptions
from tests.gateway.grpc.http2.calls import ECHO, HELD, STREAM, serving_calls
from tests.gateway.grpc.http2.client import (
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
from tests.gateway.grpc.parts import HeldModel, infer_request, serving
from tests.gateway.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.parametrize("server_name", ["sluice"], indirect=True)
INVALID, DEADLINE, TOO_LONG, UNIMPLEMENTED, INTERNAL = 3, 4, 8, 12, 13


def changed(name: str, value: str) -> list[tuple[str, str]]:
    return [(each, value if each == name else given) for each, given in request_fields()]


# --- the head ---


@pytest.mark.parametrize(
    "fields",
    [
        changed("content-type", "application/json"),
        changed("content-type", "application/grpc-web"),
        changed("content-type", "application/grpcx"),
        changed("content-type", ""),
        [each for each in request_fields() if each[0] != "content-type"],
        changed(":method", "GET"),
    ],
)
async def test_what_is_no_call(fields: list[tuple[str, str]]) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        refused = await answer(client, fields, message(b""))
        [block] = refused.blocks
        assert (block[":status"], block["grpc-status"], block["content-type"]) == ("415", "3", "application/grpc")
        named = dict(fields)
        assert "this port speaks gRPC" in block["grpc-message"]
        assert (
            repr(named.get("content-type", "")) in block["grpc-message"] and named[":method"] in block["grpc-message"]
        )
        assert (await client.ask(101)).messages == [b"hello"]


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc+proto", "Application/gRPC ; charset=utf-8"])
async def test_content_types(kind: str) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        found = await answer(client, changed("content-type", kind), message(b"x"))
        assert (found.status, found.messages) == (0, [b"x"])
        assert found.blocks[0] == {
            ":status": "200",
            "content-type": "application/grpc",
            "grpc-accept-encoding": "identity, deflate, gzip",
        }


@pytest.mark.parametrize("path", ["/unknown", "/test/Unknown", "no slash", "/test/Echo/"])
async def test_an_unknown_method(path: str) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        [block] = (await answer(client, changed(":path", path), message(b"x"))).blocks
        assert (block[":status"], block["grpc-status"], block["grpc-message"]) == ("200", "12", "Method not found!")


async def test_an_unknown_encoding() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        [block] = (await answer(client, request_fields(more=[("grpc-encoding", "br")]), message(b"x", 1))).blocks
        assert (block[":status"], block["grpc-status"]) == ("200", "12")
        assert block["grpc-message"] == "grpc-encoding 'br' is not known here, use one of identity, deflate, gzip"
        assert block["grpc-accept-encoding"] == "identity, deflate, gzip"


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
        ("0S", 0.0),
        ("99999999H", 99999999 * 3600.0),
        ("007S", 7.0),
        *((bad, None) for bad in ("", "S", "1", "1s", "1 S", "-1S", "+1S", "1.5S", "100000000S", "1SS", "１S", "1_0S")),
    ],
)
def test_timeouts_are_read(text: str, seconds: float | None) -> None:
    assert wire.parse_timeout(text) == (None if seconds is None else pytest.approx(seconds))


@pytest.mark.parametrize("text", ["", "soon", "-1S", "123456789S"])
async def test_a_timeout_that_is_none(text: str) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        [block] = (await answer(client, request_fields(more=[("grpc-timeout", text)]), message(b"x"))).blocks
        assert (block[":status"], block["grpc-status"]) == ("200", "3")
        assert block["grpc-message"] == f"grpc-timeout is up to 8 digits and a unit of HMSmun, got {text!r}"


@pytest.mark.parametrize("is_sent", [True, False], ids=["complete", "without its message"])
async def test_the_server_itself_keeps_to_a_deadline(is_sent: bool) -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.headers(1, HELD, [("grpc-timeout", "30m")]))
        if is_sent:
            client.send(frame(DATA, END_STREAM, 1, message(b"x")))
        ended = await client.end_of(1)
        assert (ended.status, ended.blocks[-1]["grpc-message"]) == (DEADLINE, "Deadline Exceeded")
        await calls.until_idle()
        assert (calls.num_held, calls.num_cancelled) == (0, int(is_sent))


async def test_a_deadline_amid_a_response_that_nobody_takes() -> None:
    async with serving_calls() as calls, connected(calls.port, {4: 0}) as client:
        client.send(client.request(1, ECHO, b"x", [("grpc-timeout", "50m")]))
        ended = await client.end_of(1)
        assert ended.reset == 8 and not ended.data
        await calls.until_idle()


@pytest.mark.parametrize("number_of_messages", [0, 1], ids=["before the message", "with the job"])
async def test_an_inference_whose_time_is_over_is_cancelled(number_of_messages: int) -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running, connected(running.port) as client:
        content = infer_request("held", 1, id="late").SerializeToString()
        path = "/inference.GRPCInferenceService/ModelInfer"
        client.send(client.headers(1, path, [("grpc-timeout", "100m")]))
        if number_of_messages:
            client.send(frame(DATA, END_STREAM, 1, message(content)))
        assert (await client.end_of(1)).status == DEADLINE
        if number_of_messages:
            await model.until(lambda: model.cancelled == ["late"])


async def test_an_inference_that_is_reset_is_cancelled() -> None:
    model = HeldModel()
    async with serving(SmallService(model)) as running, connected(running.port) as client:
        content = infer_request("held", 1, id="left").SerializeToString()
        client.send(client.request(1, "/inference.GRPCInferenceService/ModelInfer", content))
        await model.until(lambda: len(model.jobs) == 1)
        client.send(reset(1))
        await model.until(lambda: model.cancelled == ["left"])


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


@pytest.mark.parametrize("path", [ECHO, "/inference.GRPCInferenceService/ModelInfer"])
@pytest.mark.parametrize("number", [0, 2, 5000])
async def test_other_than_one_message_in_a_unary_call(path: str, number: int) -> None:
    model = HeldModel()
    content = infer_request("held", 1).SerializeToString()
    if path == ECHO:
        async with serving_calls() as calls, connected(calls.port) as client:
            ended = await answer(client, request_fields(path), *[message(content)] * number)
    else:
        async with serving(SmallService(model)) as running, connected(running.port) as client:
            ended = await answer(client, request_fields(path), *[message(content)] * number)
    assert ended.status == UNIMPLEMENTED
    text, _, found = ended.blocks[-1]["grpc-message"].rpartition(" ")
    assert text == f"{path} takes one message, got" and min(number, 2) <= int(found) <= number
    assert not model.jobs


async def test_a_second_message_is_refused_before_the_end() -> None:
    model = HeldModel()
    one = message(infer_request("held", 1).SerializeToString())
    async with serving(SmallService(model)) as running, connected(running.port) as client:
        client.send(client.headers(1, "/inference.GRPCInferenceService/ModelInfer"))
        client.send(frame(DATA, 0, 1, one), frame(DATA, 0, 1, one))
        assert (await client.end_of(1)).status == UNIMPLEMENTED
        assert not model.jobs


async def test_nothing_is_inferred_for_a_call_whose_last_frame_is_refused() -> None:
    model = HeldModel()
    one = message(infer_request("held", 1).SerializeToString())
    async with serving(SmallService(model)) as running, connected(running.port) as client:
        client.send(client.headers(1, "/inference.GRPCInferenceService/ModelInfer"))
        client.send(frame(DATA, 0, 1, one), frame(DATA, END_STREAM, 1, b"\0\xff\xff\xff\xff"))
        assert (await client.end_of(1)).status == TOO_LONG
        assert (await client.ask(3, "/inference.GRPCInferenceService/ServerLive", b"")).status == 0
        assert not model.jobs


@pytest.mark.parametrize("path", [ECHO, STREAM, "/inference.GRPCInferenceService/ModelInfer"])
@pytest.mark.parametrize("lacking", [1, 4, 7])
async def test_a_message_that_is_cut_short(path: str, lacking: int) -> None:
    async with serving_calls() as calls, serving(SmallService()) as running:
        async with connected(running.port if "Infer" in path else calls.port) as client:
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
@pytest.mark.parametrize("begin", ["", "a", "ab", "abc"])
def test_very_long_texts_are_cut_between_letters(letter: str, begin: str) -> None:
    sent = wire.encode_message(begin + letter * 5000)
    assert len(sent) <= wire.MAX_MESSAGE_BYTES + 3
    found = unquote(sent.decode(), errors="strict")
    assert found.endswith("...") and found.removeprefix(begin).removesuffix("...").strip(letter) == ""
    assert len(sent) > wire.MAX_MESSAGE_BYTES - 12


async def test_metadata_that_are_no_base64() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        [block] = (await answer(client, request_fields(more=[("x-bin", "a?b")]), message(b""))).blocks
        assert (block["grpc-status"], block["grpc-message"]) == ("3", "the metadata x-bin must be base64, got 'a?b'")


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


async def test_the_deadline_of_a_stock_client_reaches_the_handler() -> None:
    async with serving_calls() as calls, grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
        with pytest.raises(grpc.RpcError) as caught:
            await channel.unary_unary(HELD)(b"", timeout=0.05)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await calls.until_idle()
        assert await channel.unary_unary(ECHO)(b"x", timeout=PATIENCE_S) == b"x"
