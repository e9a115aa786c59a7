"""Engine processes that take clients over TCP: keys, cut connections, engines that crash or hang, clients that do harm.
`test_attached.py` has the rest in virtual time."""

import asyncio
import itertools
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio
import zmq

from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig, Listening
from sluice.engine.frames import Attach, Drain, Shutdown, Submit
from sluice.engine.process.curve import ClientCurve, make_certificates, read_pair, read_public
from sluice.errors import SluiceError
from tests.engine.client.faulty_engine import MODULE
from tests.engine.client.test_recovery import collect, harmless, request
from tests.engine.fake_runner import echo
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANY_PORT = "tcp://127.0.0.1:0"


class Keys:
    """Certificates of an engine and its clients in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.allowed = folder / "keys", folder / "allowed"
        self.allowed.mkdir(parents=True)
        make_certificates(self.folder, "engine")

    def listening(self, endpoint: str = ANY_PORT) -> Listening:
        return Listening(
            endpoints=[endpoint],
            curve_key=str(self.folder / "engine.key_secret"),
            allowed_clients=str(self.allowed),
        )

    def client(self, name: str, *, is_allowed: bool = True) -> ClientCurve:
        public, secret = make_certificates(self.folder, name)
        if is_allowed:
            self.allow(public)
        return ClientCurve(read_pair(secret), read_public(self.folder / "engine.key"))

    def allow(self, public: Path) -> None:
        (self.allowed / public.name).write_bytes(public.read_bytes())


@asynccontextmanager
async def listening(folder: Path, chosen: Listening, **limits: object) -> AsyncIterator[ProcessEngineClient]:
    """The launcher of an engine that takes clients over TCP."""
    config = EngineConfig(model_path=str(folder), listening=chosen, **limits)  # type: ignore[arg-type]
    launcher = ProcessEngineClient(config, module=MODULE)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await launcher.start()
            yield launcher
    finally:
        await launcher.stop()


@asynccontextmanager
async def attached(endpoint: str, *curves: ClientCurve | None) -> AsyncIterator[list[AttachedEngineClient]]:
    clients = [AttachedEngineClient(EngineConfig(model_path=""), endpoint, curve=curve) for curve in curves]
    async with AsyncExitStack() as stack:
        for client in clients:
            stack.push_async_callback(client.stop)
        await asyncio.gather(*(client.start() for client in clients))
        yield clients


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def keyed(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Keys, ProcessEngineClient]]:
    """Keys, and the launcher of an engine that wants them."""
    folder = tmp_path_factory.mktemp("keyed")
    keys = Keys(folder)
    async with listening(folder, keys.listening()) as launcher:
        yield keys, launcher


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def launcher(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessEngineClient]:
    """The launcher of an engine that takes everybody on this machine."""
    async with listening(tmp_path_factory.mktemp("open"), Listening(endpoints=[ANY_PORT])) as running:
        yield running


async def test_two_gateways_get_the_tokens_that_the_launcher_gets(keyed: tuple[Keys, ProcessEngineClient]) -> None:
    prompts, (keys, launcher) = harmless(9, 60), keyed
    async with attached(launcher.endpoints[0], keys.client("one"), keys.client("two")) as clients:
        everybody = itertools.cycle((launcher, *clients))
        streams = [client.submit(request(prompt)) for prompt, client in zip(prompts, everybody, strict=False)]
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]


async def test_a_key_that_is_not_allowed_is_refused_until_it_is(keyed: tuple[Keys, ProcessEngineClient]) -> None:
    keys, launcher = keyed
    late = AttachedEngineClient(
        EngineConfig(model_path=""), launcher.endpoints[0], curve=keys.client("late", is_allowed=False)
    )
    try:
        starting = asyncio.create_task(late.start())
        await until(lambda: late.problem == "it does not allow the key of this client")
        assert not starting.done()
        keys.allow(keys.folder / "late.key")
        await starting
        [prompt] = harmless(1, 20)
        assert await collect(late.submit(request(prompt, 20))) == echo(prompt, 20)
    finally:
        await late.stop()


async def test_a_client_without_keys_or_with_the_wrong_server_key_is_refused(
    keyed: tuple[Keys, ProcessEngineClient],
) -> None:
    keys, launcher = keyed
    good = keys.client("good")
    for curve in (None, good._replace(server=good.keys.public)):
        client = AttachedEngineClient(
            EngineConfig(model_path=""), launcher.endpoints[0], curve=curve, give_up_after_s=0.5
        )
        with pytest.raises(SluiceError, match="no engine could be reached"):
            await client.start()
        await client.stop()


async def test_streams_go_on_after_a_kill_at_the_same_port(launcher: ProcessEngineClient) -> None:
    prompts, num_before, endpoints = harmless(20, 60), launcher.recoveries.num_restarts, launcher.endpoints
    async with attached(endpoints[0], None, None) as clients:
        pairs = zip(prompts, itertools.cycle(clients), strict=False)
        streams = [client.submit(request(prompt)) for prompt, client in pairs]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGKILL)
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        assert [client.recoveries.num_restarts for client in clients] == [1, 1]
        await until(lambda: launcher.recoveries.num_restarts == num_before + 1)
        assert launcher.endpoints == endpoints


async def test_an_engine_that_is_stopped_is_noticed_and_its_streams_go_on(launcher: ProcessEngineClient) -> None:
    [prompt] = harmless(1, 60)
    async with attached(launcher.endpoints[0], None) as [client]:
        stream = client.submit(request(prompt))
        await until(lambda: len(stream.output_token_ids) > 3)
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGSTOP)
        await until(lambda: client.is_restarting)
        assert client.heartbeat_age_s() < 10.0, "the connection's own heartbeat is the faster one"
        os.kill(launcher.pid, signal.SIGCONT)
        assert await collect(stream) == echo(prompt, 60)


class Cable:
    """A TCP relay that can be cut: its connections end without the other side having said a word."""

    def __init__(self, endpoint: str) -> None:
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        self._place = host, int(port)
        self._writers: list[asyncio.StreamWriter] = []
        self.endpoint = ""

    @asynccontextmanager
    async def laid(self) -> AsyncIterator["Cable"]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            self.cut()

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._place)
        self._writers += [writer, far_writer]
        await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65_536):
            writer.write(data)
    except OSError:
        pass
    finally:
        writer.close()


async def test_streams_go_on_after_a_cut_in_the_same_engine(launcher: ProcessEngineClient) -> None:
    prompts, num_before = harmless(8, 300), launcher.recoveries.num_restarts
    async with Cable(launcher.endpoints[0]).laid() as cable, attached(cable.endpoint, None) as [client]:
        streams = [client.submit(request(prompt, 300)) for prompt in prompts]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        cable.cut()
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 300) for prompt in prompts]
        assert client.recoveries.num_restarts == 1
        await until(lambda: launcher.stats.num_running == 0)
        assert launcher.recoveries.num_restarts == num_before


@contextmanager
def raw_client(endpoint: str) -> Iterator["zmq.Socket[bytes]"]:
    context = zmq.Context()
    dealer = context.socket(zmq.DEALER)
    try:
        dealer.connect(endpoint)
        yield dealer
    finally:
        dealer.close(0)
        context.term()


async def test_no_client_over_tcp_can_end_or_harm_the_engine(launcher: ProcessEngineClient) -> None:
    [prompt], num_before, [endpoint] = harmless(1, 40), launcher.recoveries.num_restarts, launcher.endpoints
    encode = msgspec.msgpack.encode
    with raw_client(endpoint) as raw:
        twice = Submit(7, request(prompt, 9000))
        for messages in (
            [[b""]],
            [[encode(Shutdown())], [encode(Drain())]],
            [[encode(Attach())], [encode(Shutdown())], [encode(Drain())]],
            [[encode(Attach())], [b"\xc1 no message at all"]],
            [[encode(Attach())], [b"a", b"b", b"c"], [b"\x91" * 5000]],
            [[encode(Attach())], [encode(twice)], [encode(twice)]],
        ):
            for message in messages:
                raw.send_multipart(message)
        await until(lambda: launcher.stats.num_running == 0)
        assert await collect(launcher.submit(request(prompt, 40))) == echo(prompt, 40)
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port))) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\x00" * 5000)
        assert await collect(launcher.submit(request(prompt, 40))) == echo(prompt, 40)
    assert launcher.recoveries.num_restarts == num_before


READ_NOTHING = """
import sys, time, msgspec, zmq
from sluice.engine.frames import Attach, Submit
from tests.engine.client.test_recovery import request
dealer = zmq.Context().socket(zmq.DEALER)
dealer.setsockopt(zmq.RCVHWM, 10)
dealer.connect(sys.argv[1])
dealer.send(msgspec.msgpack.encode(Attach()))
dealer.recv()
for number in range(8):
    dealer.send(msgspec.msgpack.encode(Submit(number, request([10 + number, 2, 3], 14_000, logprobs=20))))
dealer.recv()
print("begun", flush=True)
time.sleep(600)
"""


async def test_a_stopped_client_is_dropped_and_leaves_nothing_behind(launcher: ProcessEngineClient) -> None:
    arguments = (sys.executable, "-c", READ_NOTHING, launcher.endpoints[0])
    gateway = await asyncio.create_subprocess_exec(*arguments, stdout=asyncio.subprocess.PIPE)
    try:
        assert gateway.stdout is not None
        assert await gateway.stdout.readline() == b"begun\n"
        engine = psutil.Process(launcher.pid)
        before = engine.memory_info().rss
        gateway.send_signal(signal.SIGSTOP)
        await until(lambda: launcher.stats.num_running == 0)
        assert engine.memory_info().rss < before + (64 << 20)
    finally:
        gateway.kill()
        await gateway.wait()
