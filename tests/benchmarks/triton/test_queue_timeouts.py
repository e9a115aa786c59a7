import asyncio
from argparse import Namespace
from contextlib import suppress

import pytest

from benchmarks.triton.queue_timeouts import _figures
from benchmarks.triton.timeouts_client import _load

pytestmark = pytest.mark.slow

ANSWER = b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\n{}"


async def test_a_client_counts_answers_and_rejections() -> None:
    num_requests = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_requests
        with suppress(asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"POST /v2/models/m/infer HTTP/1.1")
                await reader.readexactly(int(head.split(b"content-length: ")[1]))
                num_requests += 1
                writer.write(ANSWER % (503 if num_requests % 2 else 200))
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        outcomes = await _load(Namespace(model="m", width=1, seconds=0.05, clients=1, port=port))
    assert outcomes.num_answered + len(outcomes.rejected_s) == num_requests
    assert abs(outcomes.num_answered - len(outcomes.rejected_s)) <= 1


def test_figures_are_parts_of_the_limit() -> None:
    figures = _figures(100, [[0.0, 0.02, 0.3]])
    assert [(figure.subject, round(figure.median, 3)) for figure in figures] == [
        ("late, p50", 0.02),
        ("late, p99", 0.294),
        ("late, max", 0.3),
    ]
    assert [figure.target is not None for figure in figures] == [False, True, False]
