"""Conversations that go wrong in every way that a fixed seed makes of good ones."""

import asyncio
import logging
import random

import grpc
import pytest

from tests.gateway.grpc.http2.calls import ECHO, serving_calls
from tests.gateway.grpc.http2.conversations import converse
from tests.waiting import PATIENCE_S, until

NUM_CONVERSATIONS = 50


@pytest.mark.parametrize("seed", range(8))
async def test_conversations_that_go_wrong(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    source = random.Random(seed)
    async with serving_calls() as calls:
        for _ in range(NUM_CONVERSATIONS // 5):
            await asyncio.gather(*(converse(calls.port, random.Random(source.random())) for _ in range(5)))
        await until(lambda: not (calls.server.connections or calls.server.tasks or calls.num_held))
        async with grpc.aio.insecure_channel(f"127.0.0.1:{calls.port}") as channel:
            assert await channel.unary_unary(ECHO)(b"still there?", timeout=PATIENCE_S) == b"still there?"
            await calls.until_idle()
    assert [each.getMessage() for each in caplog.records] == []
