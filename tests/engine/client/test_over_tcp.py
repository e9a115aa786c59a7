"""Engines that take clients over TCP: keys, cut connections, engines that crash or hang, clients that do harm."""

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
import zmq

from engine.blocks import HashChain
from engine.client.attached import AttachedEngineClient
from engine.client.process import ProcessEngineClient
from engine.config import EngineConfig, Listening
from engine.frames import Attach, Drain, PrefixChanges, Shutdown, Submit
from engine.process.curve import ClientCurve, make_certificates, read_pair, read_public
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.faulty_engine import MODULE
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.fake_runner import echo
from tests.waiting import PATIENCE_S, until

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


@asynccontextmanager
async def linked(folder: Path) -> AsyncIterator[tuple[ProcessEngineClient, AttachedEngineClient]]:
    """A launcher, and a client over a port of this machine without keys."""
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(listening(folder, Listening(endpoints=[ANY_PORT])))
        [client] = await stack.enter_async_context(attached(launcher.endpoints[0], None))
        yield launcher, client


async def test_two_gateways_get_the_tokens_that_the_launcher_gets(tmp_path: Path) -> None:
    keys, prompts = Keys(tmp_path), harmless(9, 60)
    curves = [keys.client("one"), keys.client("two")]
    async with listening(tmp_path, keys.listening()) as launcher:
        [endpoint] = launcher.endpoints
        async with attached(endpoint, *curves) as clients:
            everybody = itertools.cycle((launcher, *clients))
            streams = [client.submit(request(prompt)) for prompt, client in zip(prompts, everybody, strict=False)]
            assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
            long = clients[0].submit(request(prompts[0], max_tokens=9000))
            await until(lambda: len(long.output_token_ids) > 3)
            await clients[0].stop()
            await until(lambda: launcher.stats.num_running == 0)


async def test_a_key_that_is_not_allowed_is_refused_until_it_is(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    curve = keys.client("late", is_allowed=False)
    async with listening(tmp_path, keys.listening()) as launcher:
        [endpoint] = launcher.endpoints
        short = AttachedEngineClient(EngineConfig(model_path=""), endpoint, curve=curve, give_up_after_s=1.0)
        with pytest.raises(SluiceError, match="it does not allow the key of this client") as caught:
            await short.start()
        await short.stop()
        assert caught.value.code is ErrorCode.UNAVAILABLE
        waiting = AttachedEngineClient(EngineConfig(model_path=""), endpoint, curve=curve)
        try:
            starting = asyncio.create_task(waiting.start())
            await until(lambda: waiting.problem is not None)
            assert not starting.done()
            keys.allow(keys.folder / "late.key")
            await starting
            [prompt] = harmless(1, 20)
            assert await collect(waiting.submit(request(prompt, 20))) == echo(prompt, 20)
        finally:
            await waiting.stop()


async def test_a_client_without_keys_or_with_the_wrong_server_key_is_refused(tmp_path: Path) -> None:
    keys = Keys(tmp_path)
    good = keys.client("good")
    async with listening(tmp_path, keys.listening()) as launcher:
        for curve in (None, good._replace(server=good.keys.public)):
            client = AttachedEngineClient(
                EngineConfig(model_path=""), launcher.endpoints[0], curve=curve, give_up_after_s=1.0
            )
            with pytest.raises(SluiceError, match="no engine could be reached"):
                await client.start()
            await client.stop()


async def test_streams_go_on_after_a_kill_at_the_same_port(tmp_path: Path) -> None:
    keys, prompts = Keys(tmp_path), harmless(20, 60)
    curves = [keys.client("one"), keys.client("two")]
    async with listening(tmp_path, keys.listening()) as launcher:
        [endpoint] = launcher.endpoints
        async with attached(endpoint, *curves) as clients:
            pairs = zip(prompts, itertools.cycle(clients), strict=False)
            streams = [client.submit(request(prompt)) for prompt, client in pairs]
            await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
            assert launcher.pid is not None
            os.kill(launcher.pid, signal.SIGKILL)
            assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
            assert [client.num_restarts for client in clients] == [1, 1]
            assert launcher.endpoints == (endpoint,)


async def test_an_engine_that_is_stopped_is_noticed_and_its_streams_go_on(tmp_path: Path) -> None:
    [prompt] = harmless(1, 60)
    async with linked(tmp_path) as (launcher, client):
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


async def test_streams_go_on_after_a_cut_in_the_same_engine(tmp_path: Path) -> None:
    prompts = harmless(8, 300)
    async with AsyncExitStack() as stack:
        launcher = await stack.enter_async_context(listening(tmp_path, Listening(endpoints=[ANY_PORT])))
        cable = await stack.enter_async_context(Cable(launcher.endpoints[0]).laid())
        [client] = await stack.enter_async_context(attached(cable.endpoint, None))
        streams = [client.submit(request(prompt, 300)) for prompt in prompts]
        for num_tokens in (3, 40):
            await until(lambda least=num_tokens: all(len(s.output_token_ids) > least for s in streams))
            cable.cut()
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 300) for prompt in prompts]
        assert client.num_restarts == 2
        await until(lambda: launcher.stats.num_running == 0)
        assert launcher.num_restarts == 0


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


async def test_no_client_over_tcp_can_end_or_harm_the_engine(tmp_path: Path) -> None:
    [prompt] = harmless(1, 40)
    encode = msgspec.msgpack.encode
    async with listening(tmp_path, Listening(endpoints=[ANY_PORT])) as launcher:
        [endpoint] = launcher.endpoints
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
        assert launcher.num_restarts == 0


READ_NOTHING = """
import sys, time, msgspec, zmq
from engine.frames import Attach, Submit
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


async def test_a_stopped_client_is_dropped_and_leaves_nothing_behind(tmp_path: Path) -> None:
    async with listening(tmp_path, Listening(endpoints=[ANY_PORT])) as launcher:
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


async def test_who_drains_refuses_new_requests_and_ends_the_others(tmp_path: Path) -> None:
    first, second = harmless(2, 300)
    async with linked(tmp_path) as (launcher, client):
        stream = client.submit(request(first, 300))
        await until(lambda: len(stream.output_token_ids) > 3)
        launcher.drain()
        await until(lambda: client.stats.is_draining)
        refused = await failure_of(client.submit(request(second)))
        assert (refused.code, refused.message) == (
            ErrorCode.UNAVAILABLE,
            "the engine takes no new requests: it is about to end",
        )
        assert await collect(stream) == echo(first, 300)


class Mirror:
    """The prefixes of an engine as one client knows them."""

    def __init__(self, client: AttachedEngineClient | ProcessEngineClient) -> None:
        self.hashes: set[bytes] = set()
        self.num_starts = 0
        self.last_number = 0
        client.on_prefixes = self.take

    def take(self, changes: PrefixChanges) -> None:
        assert changes.is_first or changes.number == self.last_number + 1
        self.last_number = changes.number
        if changes.is_first:
            self.hashes.clear()
            self.num_starts += 1
        stored, removed = _split(changes.stored), _split(changes.removed)
        assert not stored & removed
        self.hashes = (self.hashes | stored) - removed


def _split(hashes: bytes) -> set[bytes]:
    return {hashes[begin : begin + 16] for begin in range(0, len(hashes), 16)}


def expected_hashes(prompt: list[int], num_tokens: int, salt: str = "", adapter: str = "") -> set[bytes]:
    """Return the hashes of the full blocks of a prompt and its answer; the last token is not computed."""
    tokens = (prompt + echo(prompt, num_tokens))[:-1]
    return set(HashChain(salt, 32, adapter).hashes(tokens, len(tokens) // 32))


async def test_everybody_who_asks_knows_the_prefixes(tmp_path: Path) -> None:
    first, second, third = harmless(3, 100)
    async with linked(tmp_path) as (launcher, client):
        assert await collect(launcher.submit(request(first, 100))) == echo(first, 100)
        early = Mirror(client)
        expected = expected_hashes(first, 100)
        await until(lambda: early.hashes == expected)
        late = Mirror(launcher)
        await collect(client.submit(request(second, 100, cache_salt="salt")))
        expected |= expected_hashes(second, 100, "salt")
        await until(lambda: early.hashes == late.hashes == expected)
        client.restart_prefixes()
        await until(lambda: early.num_starts == 2 and early.hashes == expected)
        assert launcher.pid is not None
        os.kill(launcher.pid, signal.SIGKILL)
        await until(lambda: (early.num_starts, late.num_starts) == (3, 2))
        assert early.hashes == late.hashes == set()
        launcher.on_prefixes = None
        await collect(client.submit(request(third, 100)))
        await until(lambda: early.hashes == expected_hashes(third, 100))
        assert late.hashes == set()


async def test_the_hashes_of_an_adapter_do_not_tell_in_which_order_it_was_loaded(tmp_path: Path) -> None:
    [prompt] = harmless(1, 100)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(f"weights of {name}")
    known = []
    for order in (("a", "b"), ("b", "a")):
        async with listening(tmp_path, Listening(endpoints=[ANY_PORT]), enable_lora=True) as launcher:
            for name in order:
                await launcher.load_adapter(name, str(tmp_path / name))
            mirror = Mirror(launcher)
            await collect(launcher.submit(request(prompt, 100, adapter="a")))
            digest = launcher.info.adapter_digests["a"]
            await until(lambda mirror=mirror, digest=digest: mirror.hashes == expected_hashes(prompt, 100, "", digest))
            known.append((digest, mirror.hashes))
    assert known[0] == known[1]
    assert known[0][1] != expected_hashes(prompt, 100)


async def test_an_endpoint_that_is_taken_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        endpoint = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(SluiceError, match=f"the engine cannot listen at {endpoint}: Address already in use"):
            async with listening(tmp_path, Listening(endpoints=[endpoint])):
                pass


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoints": ["tcp://0.0.0.0:1"]}, "tcp://0.0.0.0:1 is open to other machines, which needs a CURVE key"),
        ({"endpoints": ["tcp://*:1"]}, "is open to other machines"),
        ({"endpoints": ["ipc:///x"]}, "an endpoint must be tcp://HOST:PORT, such as .*, got 'ipc:///x'"),
        ({"endpoints": ["tcp://localhost:70000"]}, "got 'tcp://localhost:70000'"),
        ({"endpoints": [ANY_PORT], "curve_key": "k"}, "need each other"),
        ({"endpoints": [], "curve_key": "k", "allowed_clients": "f", "is_insecure": True}, "not both"),
    ],
)
def test_endpoints_without_keys_are_of_this_machine(fields: dict[str, object], message: str) -> None:
    with pytest.raises(SluiceError, match=message):
        Listening(**fields)  # type: ignore[arg-type]


def test_insecure_endpoints_are_said_in_so_many_words() -> None:
    assert Listening(endpoints=["tcp://0.0.0.0:1", "tcp://[::1]:2"], is_insecure=True).curve_key is None


def test_secret_keys_are_for_one_user_and_never_replaced(tmp_path: Path) -> None:
    public, secret = make_certificates(tmp_path / "new", "engine")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    assert read_pair(secret).public == read_public(public)
    with pytest.raises(SluiceError, match="is there already; keys are never replaced"):
        make_certificates(tmp_path / "new", "engine")
    with pytest.raises(SluiceError, match=r"must be a name of a file, got '\.\./x'"):
        make_certificates(tmp_path, "../x")
    with pytest.raises(SluiceError, match="has no secret key"):
        read_pair(public)
    (tmp_path / "bad.key").write_text("nothing")
    with pytest.raises(SluiceError, match=r"bad.key is no certificate as `sluice engine keys` makes them"):
        read_public(tmp_path / "bad.key")
