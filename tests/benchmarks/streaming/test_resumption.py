"""The benchmark of cut streams in small: none lost, none twice, and it sees where one is."""

import asyncio
import random
from pathlib import Path

import pytest

from benchmarks.figures import BenchmarkError
from benchmarks.server import running_server
from benchmarks.streaming.cutting import Cuts, CutStream
from benchmarks.streaming.resumption import EXACT, RESUME_S, read_all
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint

NUM_STREAMS = 60


@pytest.mark.long
@pytest.mark.slow
async def test_every_stream_is_whole(tmp_path: Path) -> None:
    checkpoint = write_tiny_checkpoint(tmp_path / "tiny" / "1")
    options = (f"--stream-resume-secs={RESUME_S}", EXACT, "--served-model-name=tiny")
    with running_server(checkpoint, tmp_path / "log", *options) as server:
        seen = await read_all([server], "tiny", NUM_STREAMS, num_open=20)
    assert seen.streams == NUM_STREAMS
    assert seen.connections > NUM_STREAMS
    assert seen.differing == 0


@pytest.mark.parametrize("numbers", [(1, 3), (1, 1), (2,)])
async def test_a_lost_or_repeated_event_is_found(numbers: tuple[int, ...]) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b"".join(b"id: a:%d\ndata: x\n\n" % number for number in numbers)
        head = b"HTTP/1.1 200 OK\r\nx-sluice-stream: a\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        address = server.sockets[0].getsockname()
        stream = CutStream([address], "/v1/completions", {}, Cuts(random.Random(1), 0, 0))
        with pytest.raises(BenchmarkError, match="comes next"):
            await stream.read()
