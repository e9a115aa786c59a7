"""Clients beside the launcher of an engine, in virtual time: they share it, and survive its loss as the launcher's
requests do."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from sluice.engine.blocks import HashChain
from sluice.engine.client.base import EngineClient
from sluice.engine.client.link import EngineLink
from sluice.engine.frames import PrefixChanges, ProbeTurn
from sluice.engine.process import transport
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.faulty_engine import CRASH
from tests.engine.client.network import Network, Router
from tests.engine.client.test_recovery import collect, failure_of, harmless, request
from tests.engine.client.virtual import Break, Plan, VirtualAttached, VirtualClient, in_virtual_time, virtual_config
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import elsewhere
from tests.errors import error_of
from tests.waiting import until


@asynccontextmanager
async def shared(
    folder: Path, num_attached: int = 2, **limits: object
) -> AsyncIterator[tuple[VirtualClient, list[VirtualAttached]]]:
    """A launcher and clients that have attached to its engine, which they found before it was there."""
    network, config, place = Network(), virtual_config(**limits), folder / "shared"
    launcher = VirtualClient(Plan(network=network), config, shared_socket=place)
    others = [VirtualAttached(network, config, place) for _ in range(num_attached)]
    try:
        await asyncio.gather(*(client.start() for client in (*others, launcher)))
        yield launcher, others
    finally:
        for client in (*others, launcher):
            await client.stop()
    launcher.check()


# -- at the launcher's socket


@in_virtual_time
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


@in_virtual_time
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
        assert error_of(others[1].submit, request([5])).message == "the engine was stopped"


@in_virtual_time
async def test_streams_of_all_go_on_after_a_crash(tmp_path: Path) -> None:
    prompts = harmless(30, 60)
    async with shared(tmp_path, max_num_seqs=30, max_num_batched_tokens=64) as (launcher, others):
        clients = itertools.cycle((launcher, *others))
        streams = [client.submit(request(prompt)) for prompt, client in zip(prompts, clients, strict=False)]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        launcher.engine.end()
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        assert [client.recoveries.num_restarts for client in (launcher, *others)] == [1, 1, 1]


@in_virtual_time
async def test_nobody_is_blamed_for_the_request_of_another_client(tmp_path: Path) -> None:
    [bystander] = harmless(1, 60)
    async with shared(tmp_path) as (_, [guilty, other]):
        poison = guilty.submit(request([CRASH]))
        stream = other.submit(request(bystander))
        assert "crashed the engine twice" in (await failure_of(poison)).message
        assert await collect(stream) == echo(bystander, 60)
        assert (guilty.recoveries.num_poisoned, other.recoveries.num_poisoned) == (1, 0)


@in_virtual_time
async def test_adapters_of_the_launcher_are_everybodys(tmp_path: Path) -> None:
    prompt, other = harmless(2, 60)
    async with shared(tmp_path, 1, enable_lora=True) as (launcher, [client]):
        await launcher.load_adapter("a", "/adapters/a")
        await until(lambda: client.info.adapters == ("a",))
        stream = client.submit(request(prompt, adapter="a"))
        await until(lambda: stream.output_token_ids)
        launcher.engine.end()
        await until(lambda: client.is_restarting)
        assert await collect(stream) == echo(prompt, 60)
        assert await collect(client.submit(request(other, adapter="a"))) == echo(other, 60)


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\xabload_failed\xa8internal\xa1\xff", b"\x91" * 5000])
@in_virtual_time
async def test_the_last_words_of_an_engine_are_read_as_far_as_they_can_be(garbage: bytes) -> None:
    network = Network()
    router = Router(network)
    router.bind("tcp://engine:1")
    link = EngineLink(network)  # type: ignore[arg-type]
    link.open("tcp://engine:1")
    link.greet()
    client, _ = router.recv_multipart()
    for content in (msgspec.msgpack.encode(ProbeTurn(7)), garbage, msgspec.msgpack.encode(ProbeTurn(8))):
        router.send_multipart((client, content))
    assert await link.read_remaining() == [ProbeTurn(7)]
    link.close()


# -- at an endpoint of the network


@pytest.mark.parametrize("how", [*Break, None], ids=lambda how: how.value if how else "the connection is cut")
@in_virtual_time
async def test_an_answer_is_the_same_wherever_the_connection_breaks(how: Break | None) -> None:
    """A cut connection leads to the same engine again, which has other sequences by then."""
    prompts = harmless(3, 5)
    for before_frame in range(0, 16, 2):
        async with elsewhere() as place:
            launcher = await place.engine()
            client = await place.attached(launcher.endpoints[0])
            router, passed = launcher.engine.router, itertools.count()
            pass_on = router.on_frame

            def break_before(content: bytes) -> bytes | None:
                if next(passed) != before_frame:  # noqa: B023 - it is used in this turn alone
                    return pass_on(content)  # noqa: B023
                if how is None:
                    place.network.cut(client.endpoint)  # noqa: B023
                    return None
                launcher.break_wire(how)  # noqa: B023
                return pass_on(content)  # noqa: B023

            router.on_frame = break_before
            streams = [client.submit(request(prompt, 5)) for prompt in prompts]
            answers = await asyncio.gather(*map(collect, streams))
            assert answers == [echo(prompt, 5) for prompt in prompts], f"before message {before_frame}"
            assert client.recoveries.num_poisoned == 0
            await until(lambda launcher=launcher: launcher.stats.num_running == 0)
            await until(lambda launcher=launcher: launcher.recoveries.num_restarts == (how is not None))


@in_virtual_time
async def test_one_that_was_silent_is_given_up_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's messages are lost for a while: the engine cancels its requests, and takes them again later."""
    monkeypatch.setattr(transport, "CLIENT_SILENT_S", 1.5)
    [prompt] = harmless(1, 300)
    async with elsewhere() as place:
        launcher = await place.engine()
        client = await place.attached(launcher.endpoints[0])
        stream = client.submit(request(prompt, 300))
        await until(lambda: stream.output_token_ids)
        number = stream.stream_id
        launcher.engine.router.is_deaf = True
        await asyncio.sleep(2.0)
        launcher.engine.router.is_deaf = False
        assert await collect(stream) == echo(prompt, 300)
        found = client.recoveries
        assert (found.num_restarts, found.num_poisoned, launcher.recoveries.num_restarts) == (1, 0, 0)
        assert stream.stream_id == number
        await until(lambda: client.stats.generation_tokens_total == launcher.stats.generation_tokens_total)


@in_virtual_time
async def test_one_that_is_back_before_its_sequences_have_ended_goes_on_under_other_numbers() -> None:
    prompts = harmless(2, 60)
    async with elsewhere() as place:
        launcher = await place.engine()
        client = await place.attached(launcher.endpoints[0])
        streams = [client.submit(request(prompt)) for prompt in prompts]
        await until(lambda: all(len(stream.output_token_ids) > 3 for stream in streams))
        launcher.engine.stop()
        place.network.cut(client.endpoint)
        await asyncio.sleep(0.5)
        launcher.engine.go_on()
        await until(lambda: launcher.engine._transport and launcher.engine._transport._renamed)
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 60) for prompt in prompts]
        assert (client.recoveries.num_poisoned, launcher.recoveries.num_restarts) == (0, 0)


@in_virtual_time
async def test_who_drains_refuses_new_requests_and_ends_the_others() -> None:
    first, second = harmless(2, 100)
    async with elsewhere() as place:
        launcher = await place.engine()
        client = await place.attached(launcher.endpoints[0])
        stream = client.submit(request(first, 100))
        await until(lambda: len(stream.output_token_ids) > 3)
        launcher.drain()
        await until(lambda: client.stats.is_draining)
        refused = await failure_of(client.submit(request(second)))
        assert (refused.code, refused.message) == (
            ErrorCode.UNAVAILABLE,
            "the engine takes no new requests: it is about to end",
        )
        assert await collect(stream) == echo(first, 100)


@in_virtual_time
async def test_an_endpoint_where_no_engine_comes_is_given_up() -> None:
    async with elsewhere() as place:
        with pytest.raises(SluiceError, match=r"no engine could be reached at tcp://nowhere:1 for 3 s") as caught:
            await place.attached("tcp://nowhere:1", give_up_after_s=3.0)
        assert caught.value.code is ErrorCode.UNAVAILABLE


@in_virtual_time
async def test_an_endpoint_that_is_taken_is_an_error() -> None:
    async with elsewhere() as place:
        [endpoint] = (await place.engine()).endpoints
        with pytest.raises(SluiceError, match=f"the engine cannot listen at {endpoint}: Address already in use"):
            await place.engine(endpoint)


# -- what clients know of the prefix cache


class Mirror:
    """The prefixes of an engine as one client knows them."""

    def __init__(self, client: EngineClient) -> None:
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


@in_virtual_time
async def test_everybody_who_asks_knows_the_prefixes() -> None:
    first, second, third = harmless(3, 100)
    async with elsewhere() as place:
        launcher = await place.engine()
        client = await place.attached(launcher.endpoints[0])
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
        launcher.engine.end()
        await until(lambda: (early.num_starts, late.num_starts) == (3, 2))
        assert early.hashes == late.hashes == set()
        launcher.on_prefixes = None
        await collect(client.submit(request(third, 100)))
        await until(lambda: early.hashes == expected_hashes(third, 100))
        assert late.hashes == set()


@in_virtual_time
async def test_the_hashes_of_an_adapter_do_not_tell_in_which_order_it_was_loaded(tmp_path: Path) -> None:
    [prompt] = harmless(1, 100)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_text(f"weights of {name}")
    known = []
    for order in (("a", "b"), ("b", "a")):
        async with elsewhere() as place:
            launcher = await place.engine(enable_lora=True)
            for name in order:
                await launcher.load_adapter(name, str(tmp_path / name))
            mirror = Mirror(launcher)
            await collect(launcher.submit(request(prompt, 100, adapter="a")))
            digest = launcher.info.adapter_digests["a"]
            await until(lambda mirror=mirror, digest=digest: mirror.hashes == expected_hashes(prompt, 100, "", digest))
            known.append((digest, mirror.hashes))
    assert known[0] == known[1]
    assert known[0][1] != expected_hashes(prompt, 100)
