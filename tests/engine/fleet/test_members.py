"""Engines elsewhere: joining, leaving, crashing, and what a file says of them."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import yaml

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.client import FleetClient
from sluice.engine.fleet.joining import make_fleet
from sluice.engine.fleet.membership import file
from sluice.engine.fleet.membership.file import FileMembership, read_members
from sluice.engine.fleet.membership.members import Member, PushedMembership
from sluice.errors import ErrorCode, SluiceError
from tests.engine.client.test_over_tcp import Keys, listening
from tests.engine.client.test_recovery import collect, harmless, request
from tests.engine.client.virtual import in_virtual_time
from tests.engine.fake_runner import echo
from tests.engine.fleet.fleets import begun, elsewhere, member
from tests.errors import error_of
from tests.waiting import PATIENCE_S, until


@pytest.fixture(autouse=True)
def look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file, "LOOK_S", 0.05)


class EnginesFile:
    """An engines.yaml beside the keys of a gateway."""

    def __init__(self, folder: Path) -> None:
        self.keys = Keys(folder)
        self.keys.client("gateway")
        self.path = self.keys.folder / "engines.yaml"

    def write(self, *engines: dict[str, object]) -> None:
        keys = {"client_key": "gateway.key_secret", "server_key": "engine.key"}
        fresh = self.path.with_suffix(".new")
        fresh.write_text(yaml.safe_dump({**keys, "engines": list(engines)}))
        fresh.replace(self.path)


def entry(name: str, launcher: ProcessEngineClient) -> dict[str, object]:
    return {"name": name, "address": launcher.endpoints[0]}


@asynccontextmanager
async def remote_fleet(path: Path, drain_s: float = 30.0) -> AsyncIterator[FleetClient]:
    client = make_fleet(EngineConfig(model_path="elsewhere"), FileMembership(path), drain_s=drain_s)
    try:
        async with asyncio.timeout(PATIENCE_S):
            await client.start()
            yield client
    finally:
        await client.stop()


async def test_engines_that_a_file_names_are_joined_over_tcp_with_its_keys(tmp_path: Path) -> None:
    engines, [prompt] = EnginesFile(tmp_path), harmless(1, 20)
    async with (
        listening(tmp_path, engines.keys.listening()) as first,
        listening(tmp_path, engines.keys.listening()) as second,
    ):
        engines.write(entry("a", first))
        async with remote_fleet(engines.path) as client:
            assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)
            engines.write(entry("b", second))
            await until(lambda: [each.name for each in client.replicas] == ["b"])
            assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)


@in_virtual_time
async def test_members_join_serve_crash_and_leave() -> None:
    prompts = harmless(16, 100)
    expected = [echo(prompt, 100) for prompt in prompts]
    async with elsewhere() as place:
        launchers = [await place.engine(max_num_seqs=16) for _ in range(2)]
        membership = PushedMembership((member(launchers[0]),))
        client = await place.fleet(membership, drain_s=0.0)
        assert [each.name for each in client.replicas] == ["a"]
        membership.push((member(launchers[0]), member(launchers[1], "b")))
        await until(lambda: len(client.replicas) == 2)

        streams = await begun(client, *prompts, max_tokens=100)
        launchers[0].engine.end()
        assert await asyncio.gather(*map(collect, streams)) == expected
        assert client.replicas[1].num_adopted == client.replicas[0].num_routed
        await until(lambda: all(each.engine.is_serving for each in client.replicas))

        before = client.stats.generation_tokens_total
        streams = await begun(client, *prompts, max_tokens=100)
        adopted_before = client.replicas[1].num_adopted
        membership.push((member(launchers[1], "b"),))
        await until(lambda: [each.name for each in client.replicas] == ["b"])
        assert client.replicas[0].num_adopted > adopted_before
        assert await asyncio.gather(*map(collect, streams)) == expected
        assert client.stats.generation_tokens_total >= before


@in_virtual_time
async def test_without_any_member_requests_are_refused_and_the_next_one_serves() -> None:
    [prompt] = harmless(1, 20)
    async with elsewhere() as place:
        first, second = await place.engine(), await place.engine()
        membership = PushedMembership((member(first),))
        client = await place.fleet(membership)
        [replica] = client.replicas
        await client.remove(replica)
        assert (client.failure, client.is_restarting) == (None, True)
        refused = error_of(client.submit, request(prompt, 20))
        assert (refused.code, refused.message) == (
            ErrorCode.UNAVAILABLE,
            "no engine of this model can be reached",
        )
        membership.push((member(second, "b"),))
        await until(lambda: client.replicas)
        assert await collect(client.submit(request(prompt, 20))) == echo(prompt, 20)


@in_virtual_time
async def test_an_engine_that_drains_gets_no_new_requests() -> None:
    prompts = harmless(4, 20)
    async with elsewhere() as place:
        launchers = [await place.engine() for _ in range(2)]
        client = await place.fleet(PushedMembership((member(launchers[0]), member(launchers[1], "b"))))
        await until(lambda: len(client.replicas) == 2)
        launchers[0].drain()
        streams = [client.submit(request(prompt, 20)) for prompt in prompts]  # some before the client has heard of it
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        await until(lambda: launchers[1].stats.generation_tokens_total == 80)


@in_virtual_time
async def test_one_of_another_model_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    async with elsewhere() as place:
        first, second = await place.engine(), await place.engine()
        membership = PushedMembership((member(first),))
        client = await place.fleet(membership)
        engine = client.replicas[0].engine
        engine._info = msgspec.structs.replace(engine.info, vocab_size=7)
        membership.push((member(first), member(second, "b")))
        await until(lambda: "must have the same vocab_size: replica a has 7, replica b 4096" in caplog.text)
        assert len(client.replicas) == 1


@in_virtual_time
async def test_one_that_joins_later_gets_the_adapters_of_the_others() -> None:
    prompts = harmless(8, 20)
    async with elsewhere() as place:
        launchers = [await place.engine(enable_lora=True) for _ in range(2)]
        membership = PushedMembership((member(launchers[0]),))
        client = await place.fleet(membership)
        await client.load_adapter("fr", "/adapters/fr")
        membership.push((member(launchers[0]), member(launchers[1], "b")))
        await until(lambda: len(client.replicas) == 2)
        assert [each.engine.info.adapters for each in client.replicas] == [("fr",), ("fr",)]
        streams = [client.submit(request(prompt, 20, adapter="fr")) for prompt in prompts]
        assert await asyncio.gather(*map(collect, streams)) == [echo(prompt, 20) for prompt in prompts]
        assert all(each.num_routed for each in client.replicas)


@in_virtual_time
async def test_requests_with_an_adapter_go_where_it_is() -> None:
    prompts = harmless(8, 60)
    async with elsewhere() as place:
        having, plain = await place.engine(lora_modules={"fr": "/adapters/fr"}), await place.engine()
        membership = PushedMembership((member(having), member(plain, "b")))
        client = await place.fleet(membership)
        await until(lambda: len(client.replicas) == 2)
        assert client.info.adapters == ("fr",)
        by_name = {each.name: each for each in client.replicas}
        streams = [client.submit(request(prompt, 60, adapter="fr")) for prompt in prompts]
        assert (by_name["a"].num_routed, by_name["b"].num_routed) == (8, 0)
        others = await begun(client, *prompts, max_tokens=60)
        having.engine.end()  # those with the adapter wait for it
        answers = await asyncio.gather(*map(collect, (*streams, *others)))
        assert answers == 2 * [echo(prompt, 60) for prompt in prompts]
        membership.push((member(plain, "b"),))
        await until(lambda: not client.info.adapters)
        assert "'fr'" in error_of(client.submit, request(prompts[0], 20, adapter="fr")).message


async def test_a_file_that_becomes_unreadable_leaves_the_members(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text("engines: [{name: a, address: 'tcp://h:1'}]")
    watching = FileMembership(path).watch()
    first = await anext(watching)
    following = asyncio.ensure_future(anext(watching))
    path.write_text("engines: [")
    await until(lambda: "the 1 engines that it had stay" in caplog.text)
    path.unlink()
    await until(lambda: caplog.text.count("the 1 engines that it had stay") == 2)
    path.write_text("engines: [{name: b, address: 'tcp://h:2'}]")
    second = await asyncio.wait_for(following, PATIENCE_S)
    assert [each.name for each in (*first, *second)] == ["a", "b"]


def test_all_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(
        """
        client_key: me.key_secret
        engines:
          - {name: a, address: "tcp://10.0.0.1:5557", server_key: a.key, weight: 2, version: new}
          - {name: b, address: "tcp://[::1]:5557", server_key: /keys/b.key, client_key: /keys/me.key_secret}
        """
    )
    mine = str(tmp_path / "me.key_secret")
    server = str(tmp_path / "a.key")
    assert read_members(path) == (
        Member(name="a", address="tcp://10.0.0.1:5557", server_key=server, client_key=mine, weight=2.0, version="new"),
        Member(name="b", address="tcp://[::1]:5557", server_key="/keys/b.key", client_key="/keys/me.key_secret"),
    )


def test_endpoints_as_llm_d_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.yaml"
    path.write_text(
        """
        endpoints:
          - {name: pod-0, namespace: default, address: 10.0.0.1, port: "5557", labels: {role: decode}}
          - {name: pod-1, address: "fd00::2", port: 5558}
        """
    )
    found = [(each.name, each.address) for each in read_members(path)]
    assert found == [("pod-0", "tcp://10.0.0.1:5557"), ("pod-1", "tcp://[fd00::2]:5558")]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("engines: [", "cannot be read"),
        ("engines: 2024-99-99", "cannot be read: a value is none: month must be in 1..12"),
        ("[" * 1200, "cannot be read: it is nested too deeply"),
        ("[]", "Expected `object`, got `array`"),
        ("{}", "there must be either engines or endpoints"),
        ("engines: [{name: a}]", r"missing required field `address` - at `\$.engines\[0\]`"),
        ("engines: [{name: a, address: h:1}]", "address of a must be tcp://HOST:PORT, got 'h:1'"),
        ("engines: [{name: a, address: 'tcp://h:70000'}]", "address of a must be tcp://HOST:PORT"),
        ("engines: [{name: '', address: 'tcp://h:1'}]", "name must be a printable text that is not empty, got ''"),
        ("engines: [{name: a, address: 'tcp://h:1', weigth: 2}]", "unknown field `weigth`"),
        ("engines: [{name: a, address: 'tcp://h:1', weight: -1}]", "weight of a must be a finite number of at least 0"),
        ("engines: [{name: a, address: 'tcp://h:1', server_key: k}]", "a has a server_key and no client_key"),
        (
            "engines: [{name: a, address: 'tcp://h:1'}, {name: a, address: 'tcp://h:2'}]",
            "name must differ from engine to engine, got 'a' twice",
        ),
        (
            "engines: [{name: a, address: 'tcp://h:1'}, {name: b, address: 'tcp://h:1'}]",
            "address must differ from engine to engine",
        ),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "engines.yaml"
    path.write_text(text)
    refused = error_of(read_members, path)
    assert (refused.code, str(path) in refused.message) == (ErrorCode.INVALID, True)
    assert re.search(problem, refused.message)


async def test_a_fleet_does_not_start_with_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(SluiceError, match="cannot be read"):
        async with remote_fleet(tmp_path / "none.yaml"):
            pass
