"""No stream of many is short: clients of generate_stream that come at once get every event."""

import asyncio
import json

import aiohttp

from tests.server_process import ServerProcess
from tests.waiting import PATIENCE_S

CLIENTS, STREAMS_EACH, EVENTS = 64, 4, 128
QUESTION = {"text_input": "a b c", "max_tokens": EVENTS}


async def positions(session: aiohttp.ClientSession, url: str) -> list[int]:
    async with session.post(url, json=QUESTION) as response:
        lines = (await response.read()).splitlines()
    return [json.loads(line.removeprefix(b"data: "))["index"] for line in lines if line]


async def test_every_stream_is_whole(triton: ServerProcess) -> None:
    url = f"{triton.base_url}/v2/models/text_repeat/generate_stream"
    timeout = aiohttp.ClientTimeout(total=2 * PATIENCE_S)

    async def run_client(session: aiohttp.ClientSession) -> list[list[int]]:
        return [await positions(session, url) for _ in range(STREAMS_EACH)]

    connector = aiohttp.TCPConnector(limit=CLIENTS)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        clients = await asyncio.gather(*(run_client(session) for _ in range(CLIENTS)))
    streams = [stream for client in clients for stream in client]
    assert streams == [list(range(EVENTS))] * (CLIENTS * STREAMS_EACH)
