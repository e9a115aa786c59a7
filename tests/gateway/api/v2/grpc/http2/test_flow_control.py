"""Windows in both directions, and the sizes that a client asks for."""

import pytest
from h2.errors import ErrorCodes as Code

from sluice.gateway.options.grpc import GrpcOptions
from tests.gateway.api.v2.grpc.http2.calls import DEAF, ECHO, LARGE, STREAM, Calls, serving_calls
from tests.gateway.api.v2.grpc.http2.client import (
    DATA,
    END_STREAM,
    HEADER_TABLE_SIZE,
    INITIAL_WINDOW_SIZE,
    LARGEST_WINDOW,
    MAX_FRAME_SIZE,
    PADDED,
    Client,
    connected,
    frame,
    message,
    reset,
    settings,
    window_update,
)
from tests.waiting import until

FRAME = 16_384
WINDOW = 1 << 20
CONNECTION_WINDOW = 16 << 20


async def settle(client: Client) -> None:
    """Wait until the server has taken all that was sent before."""
    num_pongs = len(client.pongs)
    client.send(frame(6, 0, 0, b"settled!"))
    await client.until(lambda: len(client.pongs) > num_pongs)


# --- what the server sends ---


@pytest.mark.parametrize("window", [0, 1, 5, 100])
async def test_a_small_window_is_kept_and_grows_by_updates(window: int) -> None:
    async with serving_calls() as calls, connected(calls.port, {INITIAL_WINDOW_SIZE: window}) as client:
        client.send(client.request(1, LARGE, b"200"))
        received = client.stream(1)
        await client.until(lambda: bool(received.blocks) and len(received.data) == window)
        await settle(client)
        assert len(received.data) == window and not received.is_done
        for size in (1, 2, 5):
            before = len(received.data)
            client.send(window_update(1, size))
            await client.until(lambda before=before, size=size: len(received.data) == before + size)  # type: ignore[misc]
        client.send(window_update(1, 1000))
        await client.end_of(1)
        assert received.messages == [bytes(200)] and received.status == 0


async def test_settings_move_the_windows_of_streams_that_are_open() -> None:
    async with serving_calls() as calls, connected(calls.port, {INITIAL_WINDOW_SIZE: 10}) as client:
        client.send(client.request(1, LARGE, b"500"))
        received = client.stream(1)
        await client.until(lambda: len(received.data) == 10)
        client.send(settings((INITIAL_WINDOW_SIZE, 30)))
        await client.until(lambda: len(received.data) == 30)
        client.send(settings((INITIAL_WINDOW_SIZE, 0)), window_update(1, 25))  # 30 are sent: the window is -30, then -5
        await settle(client)
        assert len(received.data) == 30
        client.send(window_update(1, 6))
        await client.until(lambda: len(received.data) == 31)
        client.send(settings((INITIAL_WINDOW_SIZE, 7), (INITIAL_WINDOW_SIZE, 1000)))
        assert (await client.end_of(1)).messages == [bytes(500)]


async def test_the_window_of_the_connection_is_kept() -> None:
    async with serving_calls() as calls, connected(calls.port, {INITIAL_WINDOW_SIZE: LARGEST_WINDOW}) as client:
        client.send(client.request(1, LARGE, b"100000"), client.request(3, LARGE, b"1"))
        received = client.stream(1)
        await client.until(lambda: len(client.order) > 0 and len(received.data) == 65_535)
        await settle(client)
        assert len(received.data) == 65_535 and not client.stream(3).data
        client.send(window_update(0, 100_000))
        assert (await client.end_of(1)).messages == [bytes(100_000)]
        assert (await client.end_of(3)).messages == [b"\0"]


async def test_two_long_responses_share_a_small_window_fairly() -> None:
    async with serving_calls() as calls, connected(calls.port, {INITIAL_WINDOW_SIZE: LARGEST_WINDOW}) as client:
        client.send(client.request(1, LARGE, b"400000"), client.request(3, LARGE, b"400000"))
        first, second = client.stream(1), client.stream(3)
        await client.until(lambda: len(first.data) + len(second.data) == 65_535)
        while len(first.data) + len(second.data) < 400_000:
            before = len(first.data) + len(second.data)
            client.send(window_update(0, 20_000))
            await client.until(lambda before=before: len(first.data) + len(second.data) == before + 20_000)  # type: ignore[misc]
        # What the first had alone, before the second had begun, is the window of the beginning at most.
        assert abs(len(first.data) - len(second.data)) <= 65_535 + 2 * FRAME
        client.send(window_update(0, 1 << 20))
        await client.end_of(1)
        await client.end_of(3)
        assert first.messages == second.messages == [bytes(400_000)]


@pytest.mark.parametrize(("own", "most"), [({}, FRAME), ({MAX_FRAME_SIZE: 100_000}, 100_000)])
async def test_frames_are_no_longer_than_the_client_takes(own: dict[int, int], most: int) -> None:
    own |= {INITIAL_WINDOW_SIZE: LARGEST_WINDOW}
    async with serving_calls() as calls, connected(calls.port, own) as client:
        client.send(window_update(0, 1 << 30), client.request(1, LARGE, b"300000"))
        received = await client.end_of(1)
        assert received.messages == [bytes(300_000)]
        assert max(received.frame_sizes) == most


@pytest.mark.parametrize("size", [0, 100, 4096, 1 << 20])
async def test_a_table_of_any_size(size: int) -> None:
    """`hpack` refuses a block that does not say at its begin that it uses a smaller table."""
    async with serving_calls() as calls, connected(calls.port, {HEADER_TABLE_SIZE: size}) as client:
        if size < 4096:
            client.decoder.max_allowed_table_size = size
        for number in range(1, 7, 2):
            assert (await client.ask(number)).messages == [b"hello"]
        client.send(settings((HEADER_TABLE_SIZE, 0)))
        await client.until(lambda: client.num_acks == 2)
        client.decoder.max_allowed_table_size = 0
        paths = ("/unknown", ECHO) if size else (ECHO, "/unknown")  # either may be the first response behind the change
        assert [(await client.ask(n, path)).status for n, path in zip((7, 9), paths, strict=True)] in ([12, 0], [0, 12])


async def test_a_response_whose_client_leaves_is_forgotten() -> None:
    async with serving_calls() as calls, connected(calls.port, {INITIAL_WINDOW_SIZE: 0}) as client:
        client.send(client.request(1, LARGE, b"100000"))
        await client.until(lambda: bool(client.stream(1).blocks))
        assert calls.num_streams == 1
        client.send(reset(1))
        await settle(client)
        await calls.until_idle()
        client.send(client.request(3, LARGE, b"0"), window_update(3, 100))
        assert (await client.end_of(3)).messages == [b""]


# --- what the server takes ---


async def test_the_server_s_windows() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        await client.until(lambda: client.num_acks == 1)
        assert client.settings[INITIAL_WINDOW_SIZE] == WINDOW
        assert client.windows == {0: CONNECTION_WINDOW - 65_535}


async def test_a_long_request_and_a_long_response() -> None:
    """20 MB both ways, by a client that keeps to the windows."""
    content = bytes(range(256)) * (20 << 12)
    async with serving_calls() as calls, connected(calls.port) as client:
        client.gives_windows = True
        await client.until(lambda: client.num_acks == 1)
        client.send(client.headers(1, ECHO))
        whole, at = message(content), 0
        while at < len(whole):
            await client.until(lambda at=at: client.room(1) > at)  # type: ignore[misc]
            size = min(FRAME, client.room(1) - at)
            is_last = at + size >= len(whole)
            client.send(frame(DATA, END_STREAM if is_last else 0, 1, whole[at : at + size]))
            at += size
            await client.drain()
        received = await client.end_of(1)
        assert received.messages == [content] and received.status == 0


@pytest.mark.parametrize("size", [0, 100, 20_000, 600_000])
async def test_a_handler_that_reads_nothing_stops_its_client(size: int) -> None:
    """Messages of any size, one after the other: the client may send a window, and another request is answered."""
    one = message(bytes(size))
    most = 2 * WINDOW + len(one)
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.headers(1, DEAF))
        await client.until(lambda: client.num_acks == 1)
        sent, whole = 0, one * (3 * WINDOW // len(one)) * 2
        while sent < len(whole):
            await settle(client)
            room = client.room(1) - sent
            if room <= 0:
                break
            for at in range(sent, min(sent + room, len(whole)), FRAME):
                client.send(frame(DATA, 0, 1, whole[at : min(at + FRAME, sent + room)]))
            sent += min(room, len(whole) - sent)
        assert sent <= most
        assert (await client.ask(3)).messages == [b"hello"]
        calls.let_go.set()
        assert (await client.end_of(1)).status == 0


async def _send_padded(client: Client, stream_id: int, content: bytes) -> int:
    """Send `content` in frames of one byte and 255 of padding, as far as windows allow; return the bytes used."""
    used = 0
    for at, byte in enumerate(content):
        await client.until(lambda used=used: client.room(stream_id) >= used + 257)  # type: ignore[misc]
        is_last = at == len(content) - 1
        client.send(frame(DATA, PADDED | (END_STREAM if is_last else 0), stream_id, bytes((255, byte)) + bytes(255)))
        used += 257
        await client.drain()
    return used


async def test_padding_uses_no_window_for_ever() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.send(client.headers(1, ECHO))
        assert await _send_padded(client, 1, message(bytes(8000))) > WINDOW
        assert (await client.end_of(1)).messages == [bytes(8000)]


async def test_a_stream_goes_on_for_longer_than_its_window() -> None:
    async with serving_calls() as calls, connected(calls.port) as client:
        client.gives_windows = True
        client.send(client.headers(1, STREAM))
        received, content = client.stream(1), bytes(100_000)
        for number in range(30):
            whole = message(content)
            for at in range(0, len(whole), FRAME):
                client.send(frame(DATA, 0, 1, whole[at : at + FRAME]))
            await client.until(lambda number=number: len(received.messages) == number + 1)  # type: ignore[misc]
            await client.drain()
        client.send(frame(DATA, END_STREAM, 1))
        await client.end_of(1)
        assert received.messages == [content] * 30


async def test_data_on_their_way_to_a_refused_call_are_no_fault() -> None:
    """A hundred calls, each refused when a window of data is on its way: the connection stays."""
    async with (
        serving_calls(GrpcOptions(port=0, http2_max_ping_strikes=0, max_input_bytes=1000)) as calls,
        connected(calls.port) as client,
    ):
        begun = message(bytes(WINDOW - 5))
        for number in range(1, 201, 2):
            client.send(client.headers(number))
            for at in range(0, len(begun), FRAME):
                client.send(frame(DATA, 0, number, begun[at : at + FRAME]))
            await client.drain()
            assert (await client.end_of(number)).status == 8
        assert not client.goaways
        assert (await client.ask(301)).messages == [b"hello"]


async def test_more_calls_than_the_server_takes_at_a_time() -> None:
    """Calls that run count, and those whose response the client does not take."""
    async with serving_calls() as calls, connected(calls.port, {INITIAL_WINDOW_SIZE: 0}) as client:
        await client.until(lambda: client.num_acks == 1)
        most = client.settings[3]
        await _fill(calls, client, most)
        refused = await client.ask(2 * most + 1)
        assert refused.reset == Code.REFUSED_STREAM
        client.send(reset(1), client.request(2 * most + 3), window_update(2 * most + 3, 1000))
        assert (await client.end_of(2 * most + 3)).status == 0


async def _fill(calls: Calls, client: Client, most: int) -> None:
    for number in range(most):
        client.send(client.request(2 * number + 1, LARGE, b"10"))
    await until(lambda: not (calls.server.calls.tasks or calls.num_streams < most))
