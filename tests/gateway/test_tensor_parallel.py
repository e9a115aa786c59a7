"""A model on two processes that compute together: real servers, and ranks that are killed or hang under streams."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial

import openai
import psutil
import pytest

from tests.engine.process.test_process_group import wait_for_end
from tests.server_process import ServerProcess, StartServer
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.torch, pytest.mark.long]
NUM_STREAMS = 4
RANKS = ("--runtime=torch", "--device=cpu", "--dtype=f32", "--num-threads=1", "--tensor-parallel-size=2")
HEARTBEAT_S = 8


def ranks_of(server: ServerProcess) -> list[psutil.Process]:
    """The processes of all ranks but the first, which is the engine."""
    return [each for each in server.engine().children() if "sluice.engine.runners.torch.worker" in each.cmdline()]


async def read_stream(client: openai.AsyncOpenAI, number: int, is_under_way: asyncio.Event) -> str:
    sampling = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
    stream = await client.completions.create(
        model="tiny",
        prompt=f"Story number {number}:",
        max_tokens=60,
        stream=True,
        extra_body={"ignore_eos": True},
        **sampling,  # type: ignore[call-overload]
    )
    texts = []
    async for chunk in stream:
        texts.append(chunk.choices[0].text)
        if len(texts) > 3:
            is_under_way.set()
    return "".join(texts)


async def read_streams(server: ServerProcess, act: Callable[[], None] | None = None) -> list[str]:
    """Return the texts of all streams. `act` is called when each is under way."""
    events = [asyncio.Event() for _ in range(NUM_STREAMS)]
    async with openai.AsyncOpenAI(base_url=f"{server.base_url}/v1", api_key="-", timeout=10 * PATIENCE_S) as client:
        reading = [asyncio.create_task(read_stream(client, number, event)) for number, event in enumerate(events)]
        if act is not None:
            for event in events:
                await event.wait()
            act()
        return await asyncio.gather(*reading)


async def test_streams_bring_the_same_text_when_a_rank_is_killed_and_when_one_hangs(start_server: StartServer) -> None:
    arguments = (*RANKS, f"--engine-heartbeat-timeout-secs={HEARTBEAT_S}")
    server = await asyncio.to_thread(start_server, *arguments)
    undisturbed = await read_streams(server)
    for number in (signal.SIGKILL, signal.SIGSTOP):
        [rank] = ranks_of(server)
        engine = server.engine()
        assert await read_streams(server, partial(rank.send_signal, number)) == undisturbed
        await asyncio.to_thread(wait_for_end, [rank.pid, engine.pid])
    assert len({*undisturbed}) == NUM_STREAMS
    assert "rank 1 of 2 ended unexpectedly with code -9; the engine ends" in server.log
    assert "the engine has been silent for" in server.log


def test_no_rank_outlives_its_engine_or_the_gateway(start_server: StartServer) -> None:
    server = start_server(*RANKS)
    engine, [rank] = server.engine(), ranks_of(server)
    os.kill(server.pid, signal.SIGKILL)
    wait_for_end([engine.pid, rank.pid])


def test_a_rank_ends_with_the_first(start_server: StartServer) -> None:
    server = start_server(*RANKS)
    engine, [rank] = server.engine(), ranks_of(server)
    engine.kill()
    wait_for_end([engine.pid, rank.pid])


def test_a_model_that_ranks_cannot_share_is_refused_at_the_start(start_server: StartServer) -> None:
    server = start_server(*RANKS[:-1], "--tensor-parallel-size=3", is_ready=False)
    assert server.process.stdout is not None
    assert server.process.stdout.read() == ""  # it ends, and was never ready
    assert server.wait_exit() != 0
    assert "tensor_parallel_size is 3, but num_attention_heads of this model is 2: it must divide 2" in server.log
