"""Clients beside the launcher of an engine: they share it, and survive its loss as the launcher's requests do."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from engine.client import attached as module
from engine.client.attached import AttachedEngineClient
from engine.client.counters import NO_STATS
from engine.client.link import EngineLink
from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig
from engine.frames import Cancel, Command, ProbeTurn, Ready, StepFrame, Submit
from engine.process.transport import Transport
from engine.types import FinishReason, TokenEvent
from sluice.errors import ErrorCode, SluiceError
from tests.clock import ManualClock
from tests.engine.client.faulty_engine import CRASH, MODULE
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.delegated.fake_runtime import INFO
from tests.engine.fake_runner import echo
from tests.waiting import PATIENCE_S, until


@asynccontextmanager
async def shared(
    folder: Path, num_attached: int = 2, **limits: object
) -> AsyncIterator[tuple[ProcessEngineClient, list[AttachedEngineClient]]]:
    """A launcher and clients that have attached to its engine, which they found before it was there."""
    config = EngineConfig(model_path=str(folder), **limits)  # type: ignore[arg-type]
    place = folder / "shared"
    launcher = ProcessEngineClient(config, module=MODULE, shared_socket=place)
    others = [AttachedEngineClient(config, place) for _ in range(num_attached)]
    async with asyncio.timeout(PATIENCE_S), AsyncExitStack() as stack:
        for client in (launcher, *others):
            stack.push_async_callback(client.stop)
        await asyncio.gather(*(client.start() for client in (*others, launcher)))
        yield launcher, others


async def test_all_get_their_own_tokens_and_who_leaves_frees_its_blocks(tmp_path: Path) -> None:
    prompts = harmless(9, 60)
    async with shared(tmp_path) as (launcher, [first, second]):
        asked = list(zip(prompts, itertools.cycle((launcher, first, second)), strict=False))
        streams = [client.submit(request(prompt)) for prompt, client in asked]
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        long = first.submit(request(prompts[0], max_tokens=9000))
        await until(lambda: launcher.stats.num_running == 1)
        await first.stop()
        assert (await failure_of(long)).code is ErrorCode.UNAVAILABLE
        await until(lambda: launcher.stats.num_running == 0)
        assert await collect(second.submit(request(prompts[0]))) == echo(prompts[0], 60)
    assert not (tmp_path / "shared").exists()


async def test_nobody_waits_for_an_engine_that_was_stopped(tmp_path: Path) -> None:
    async with shared(tmp_path) as (launcher, others):
        stream = others[0].submit(request(harmless(1, 60)[0], max_tokens=9000))
        await until(lambda: len(stream.output_token_ids) > 3)
        await launcher.stop()
        assert "the engine has ended before the request was complete" in (await failure_of(stream)).message
        await until(lambda: others[0].is_restarting)
        waiting = others[0].submit(request([5]))
        assert (await failure_of(waiting)).message == "the engine was stopped"
        await until(lambda: others[1].failure is not None)
        with pytest.raises(SluiceError, match="the engine was stopped"):
            others[1].submit(request([5]))


async def test_streams_of_all_go_on_after_a_kill(tmp_path: Path) -> None:
    prompts = harmless(30, 60)
    async with shared(tmp_path) as (launcher, others):
        clients = itertools.cycle((launcher, *others))
        streams = [client.submit(request(prompt)) for prompt, client in zip(prompts, clients, strict=False)]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGKILL)
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        assert [client.num_restarts for client in (launcher, *others)] == [1, 1, 1]


async def test_nobody_is_blamed_for_the_request_of_another_client(tmp_path: Path) -> None:
    [bystander] = harmless(1, 60)
    async with shared(tmp_path, max_num_batched_tokens=64, max_num_seqs=8) as (_, [guilty, other]):
        poison = guilty.submit(request([CRASH]))
        stream = other.submit(request(bystander))
        assert "crashed the engine twice" in (await failure_of(poison)).message
        assert await collect(stream) == echo(bystander, 60)
        assert (guilty.num_poisoned, other.num_poisoned) == (1, 0)


async def test_adapters_of_the_launcher_are_everybodys(tmp_path: Path) -> None:
    prompt, other = harmless(2, 60)
    async with shared(tmp_path, 1, enable_lora=True) as (launcher, [client]):
        await launcher.load_adapter("a", "/adapters/a")
        await until(lambda: client.info.adapters == ("a",))
        stream = client.submit(request(prompt, adapter="a"))
        await until(lambda: bool(stream.output_token_ids))
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGKILL)
        await until(lambda: client.is_restarting)
        assert await collect(stream) == echo(prompt, 60)
        assert await collect(client.submit(request(other, adapter="a"))) == echo(other, 60)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\xabload_failed\xa8internal\xa1\xff", b"\x91" * 5000])
async def test_the_last_words_of_an_engine_are_read_as_far_as_they_can_be(tmp_path: Path, garbage: bytes) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.bind(endpoint)
        link = EngineLink(context)
        link.open(endpoint)
        link.greet()
        client, _ = await asyncio.to_thread(router.recv_multipart)
        for content in (msgspec.msgpack.encode(ProbeTurn(7)), garbage, msgspec.msgpack.encode(ProbeTurn(8))):
            router.send_multipart((client, content))
        assert await link.read_remaining() == [ProbeTurn(7)]
        link.close()


class Engine:
    """The engine's side of a socket, which takes what comes and answers nothing by itself."""

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self.socket = folder / "engine"
        self.transport = Transport(f"ipc://{self.socket}", clock=clock)
        self.commands: list[Command] = []

    async def until(self, command: type[Command], number: int = 1) -> list[Command]:
        """Wait until there are `number` commands of a type, and return them."""
        while len(found := [each for each in self.commands if isinstance(each, command)]) < number:
            self.commands += self.transport.receive(0.0)
            await asyncio.sleep(0.005)
        return found


async def test_one_that_was_silent_is_given_up_and_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = ManualClock(100.0)
    monkeypatch.setattr(module, "ALIVE_S", 0.05)
    engine = Engine(tmp_path, clock)
    engine.transport.send_all(Ready(INFO))
    client = AttachedEngineClient(EngineConfig(model_path=""), engine.socket)
    try:
        async with asyncio.timeout(PATIENCE_S):
            starting = asyncio.create_task(client.start())
            while not starting.done():
                engine.commands += engine.transport.receive(0.0)
                await asyncio.sleep(0.005)
            stream = client.submit(request([5], 3))
            await engine.until(Submit)
            clock.now += 60
            engine.transport.emit(StepFrame([], [], NO_STATS))
            assert await engine.until(Cancel) == [Cancel(stream.stream_id)]
            [_, again] = await engine.until(Submit, 2)
            assert isinstance(again, Submit)
            assert again.was_accepted
            assert again.stream_id != stream.stream_id, "the sequence of that number has not ended yet"
            engine.transport.emit(StepFrame([TokenEvent(again.stream_id, [9], FinishReason.STOP)], [], NO_STATS))
            assert [event.token_ids async for event in stream] == [[9]]
            assert client.num_poisoned == 0
    finally:
        await client.stop()
        engine.transport.close()
