"""Conversations that go wrong: frames of good calls, with a mistake or two."""

import asyncio
import random

from tests.gateway.api.v2.grpc.http2.calls import DEAF, ECHO, HELD, LARGE, STREAM
from tests.gateway.api.v2.grpc.http2.client import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    PADDED,
    PING,
    Client,
    connected,
    frame,
    message,
    request_fields,
    reset,
    settings,
    window_update,
)

Frames = list[bytes]


def conversation(source: random.Random, client: Client) -> Frames:
    """Good frames: calls of each kind, windows, settings, pings."""
    sent: Frames = [settings((INITIAL_WINDOW_SIZE, source.choice([0, 10, 65_535])))]
    for number in range(1, 2 * source.randrange(2, 8), 2):
        path = source.choice([ECHO, LARGE, HELD, DEAF, STREAM, "/unknown"])
        content = b"%d" % source.randrange(50_000) if path == LARGE else bytes(source.randrange(3000))
        block = client.block(request_fields(path, [("x-number", str(source.randrange(3)))]))
        cut = source.randrange(len(block))
        sent += source.choice(
            [
                [frame(HEADERS, END_HEADERS, number, block)],
                [frame(HEADERS, 0, number, block[:cut]) + frame(CONTINUATION, END_HEADERS, number, block[cut:])],
            ]
        )
        whole = message(content) * source.choice([1, 1, 1, 3])
        step = source.choice([1000, 16_384])
        sent += [frame(DATA, 0, number, whole[at : at + step]) for at in range(0, len(whole), step)]
        sent += source.choice(
            [
                [frame(DATA, END_STREAM, number)],
                [frame(DATA, END_STREAM | PADDED, number, b"\x04" + bytes(4))],
                [window_update(number, 5000), frame(DATA, END_STREAM, number)],
                [reset(number)],
                [],
            ]
        )
        sent += source.choice([[], [frame(PING, 0, 0, b"whatever")], [frame(4, ACK, 0)], [window_update(0, 70_000)]])
    return sent


def mutate(source: random.Random, frames: Frames) -> Frames:
    """Make one or two mistakes."""
    for _ in range(source.randrange(1, 3)):
        at = source.randrange(len(frames))
        frames = list(frames)
        match source.randrange(7):
            case 0:
                del frames[at]
            case 1:
                frames.insert(at, frames[at])
            case 2:
                frames[at] = frames[at][: 1 + source.randrange(len(frames[at]))]
            case 3:
                other = source.randrange(len(frames))
                frames[at], frames[other] = frames[other], frames[at]
            case 4:
                changed = bytearray(frames[at])
                changed[source.randrange(len(changed))] ^= 1 << source.randrange(8)
                frames[at] = bytes(changed)
            case 5:
                changed = bytearray(frames[at])
                changed[min(source.randrange(3, 9), len(changed) - 1)] = source.randrange(256)
                frames[at] = bytes(changed)
            case _:
                frames.insert(at, source.randbytes(source.randrange(1, 40)))
        if not frames:
            return [b"x"]
    return frames


async def converse(port: int, source: random.Random) -> None:
    async with connected(port) as client:
        frames = mutate(source, conversation(source, client))
        whole, at = b"".join(frames), 0
        while at < len(whole) and not client.is_closed:
            size = source.choice([1, 9, 100, 10_000, 1 << 20])
            client.send(whole[at : at + size])
            at += size
            await asyncio.sleep(0)
        client.send(frame(PING, 0, 0, b"the end!"))
        try:
            async with asyncio.timeout(0.02):
                await client.until_closed()
        except TimeoutError:
            pass  # the mistake was none, or its frame still lacks bytes
