"""`GET /v1/admin/live` of a real server, whose engine is a process of its own."""

import base64
import json
import threading
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from sluice.engine.frames import OTHER_HOLDER, RESERVED
from sluice.engine.kv_cache import BlockState
from sluice.gateway.front.http.access import find_place
from sluice.gateway.tenancy.access.identity import RouteGroup
from sluice.gateway.watch.live.feeds import choose_interval
from sluice.gateway.watch.live.sample import LiveSample
from tests.gateway.front.http.live import LiveServer
from tests.server_process import MODEL, ServerProcess, StartServer
from tests.under_test import runtime

PATH = "/v1/admin/live"
LONG = {"model": MODEL, "prompt": "Hello there", "max_tokens": 400, "ignore_eos": True, "stream": True}


def samples_of(
    client: httpx.Client, interval_secs: float = 0.25, number: int = 0
) -> Generator[dict[str, Any], None, None]:
    """Yield the samples of a stream, `number` of them or for as long as they are wanted."""
    with client.stream("GET", PATH, params={"interval_secs": interval_secs}) as response:
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        ids = []
        for line in response.iter_lines():
            if line.startswith("id: "):
                ids.append(int(line[4:]))
            elif line.startswith("data: "):
                yield json.loads(line[6:])
                if len(ids) == number:
                    break
        assert ids == sorted(set(ids))


@contextmanager
def generating(client: httpx.Client, num_streams: int) -> Iterator[None]:
    """Keep streams open that nobody reads to their end."""
    is_over = threading.Event()

    def read() -> None:
        while not is_over.is_set():
            with client.stream("POST", "/v1/completions", json=LONG) as response:
                for _ in response.iter_lines():
                    if is_over.is_set():
                        break

    threads = [threading.Thread(target=read) for _ in range(num_streams)]
    for each in threads:
        each.start()
    yield
    is_over.set()
    for each in threads:
        each.join()


@pytest.fixture(scope="module")
def seen(server: ServerProcess) -> dict[str, Any]:
    """A sample of a server with three streams, one that has steps, waits and tokens in it."""
    with server.client() as client, generating(client, 3):
        for sample in samples_of(client):
            [engine] = sample["engines"]
            is_running = sample["sequences"]["total"] == sample["throughput"]["running"] == 3
            has_steps = engine["steps"] and engine["generated_tokens_per_s"]
            if has_steps and is_running and len(engine["block_map"]["holders"]) == 3:
                return sample
    raise AssertionError("the stream has ended")


def test_a_sample_has_the_schema(seen: dict[str, Any]) -> None:
    sample = msgspec.convert(seen, LiveSample)
    assert sample.version == 1
    assert seen.keys() == {field.encode_name for field in msgspec.structs.fields(LiveSample)}
    assert sample.server.state == "ready" and sample.server.uptime_s > 0
    assert 0 < sample.elapsed_s < 30 and sample.interval_s == 0.25


def test_the_engine_and_its_blocks_are_seen(seen: dict[str, Any], server: ServerProcess) -> None:
    [engine] = msgspec.convert(seen, LiveSample).engines
    assert (engine.model, engine.state, engine.runtime) == (MODEL, "serving", runtime())
    assert engine.pids == (server.engine().pid,)
    assert engine.generated_tokens_per_s > 0 and engine.steps_per_s > 0 and 0 < engine.busy <= 1
    blocks, drawn = engine.blocks, engine.block_map
    assert drawn is not None and drawn.blocks_per_cell == -(-blocks.total // 4096)
    cells = base64.b64decode(drawn.cells)
    assert len(cells) == drawn.num_cells == -(-blocks.total // drawn.blocks_per_cell)
    assert any(cell >= BlockState.OWNED for cell in cells)
    owners = base64.b64decode(drawn.owners)
    assert len(owners) == drawn.num_cells and set(owners) <= {0, 1, 2, 3, OTHER_HOLDER, RESERVED}
    assert all(bool(owner) or cell < BlockState.OWNED for cell, owner in zip(cells, owners, strict=True))
    assert {each[0] for each in drawn.holders} == {each["request_id"] for each in seen["sequences"]["items"]}
    assert all(0 < num_blocks <= num_worst_case for _, num_blocks, num_worst_case in drawn.holders)
    assert blocks.used + blocks.free == blocks.total and blocks.reserved >= blocks.used > 0


def test_steps_are_seen_once(server: ServerProcess) -> None:
    with server.client() as client, generating(client, 2):
        ends: list[float] = []
        for sample in samples_of(client, number=5):
            [engine] = sample["engines"]
            ends += [at_s for at_s, *_ in engine["steps"]]
            assert all(0 < num_seqs <= 64 and ms > 0 for _, ms, _, _, num_seqs in engine["steps"])
    assert len(ends) > 3 and ends == sorted(ends)


def test_sequences_and_models_are_listed(seen: dict[str, Any]) -> None:
    sample = msgspec.convert(seen, LiveSample)
    assert {each.model for each in sample.sequences.items} == {MODEL}
    assert all(each.max_tokens == 400 and each.prompt_tokens > 0 for each in sample.sequences.items)
    [model] = [each for each in sample.models if each.name == MODEL]
    assert model.is_llm and model.state == "READY" and model.versions[0].in_flight == 3
    [tenant] = sample.tenants
    assert tenant.name == "" and tenant.running + tenant.waiting == 3


def test_one_sample_can_be_asked_for(server: ServerProcess) -> None:
    with server.client() as client, generating(client, 1):
        answer = client.get(PATH, params={"once": True, "interval_secs": 0.5})
        assert answer.headers["content-type"] == "application/json" and answer.headers["cache-control"] == "no-store"
        sample = msgspec.convert(answer.json(), LiveSample)
    assert sample.elapsed_s >= 0.4 and sample.throughput.generated_tokens_per_s > 0
    assert sample.latency.window_s >= 0.4


def test_listeners_share_samples(server: ServerProcess) -> None:
    with server.client() as client:
        first = samples_of(client)
        next(first)
        newest = next(first)
        joined = next(samples_of(client))
        assert joined["time"] >= newest["time"], "it gets the newest at once"
        later = {next(first)["time"] for _ in range(4)}
        assert joined["time"] in {*later, newest["time"]}, "and not one of its own"
        first.close()


def test_intervals_have_bounds(live: LiveServer) -> None:
    for wrong in (0.2, 61, "soon"):
        answer = live.get(PATH, params={"interval_secs": wrong})
        assert answer.status_code == 400 and "interval_secs" in answer.json()["error"]["message"]


def test_intervals_are_few() -> None:
    assert [choose_interval(each) for each in (0.25, 0.7, 1, 1.4, 3, 12, 60)] == [0.25, 0.5, 1, 1, 2, 10, 60]


def test_only_administrators_may_look() -> None:
    assert find_place(PATH).group is RouteGroup.ADMIN


def test_streams_end_with_the_server(start_server: StartServer) -> None:
    server = start_server()
    with server.client() as client:
        samples = samples_of(client, interval_secs=1)
        next(samples)
        server.process.terminate()
        states = [each["server"]["state"] for each in samples]
    assert states[-1] == "draining", "the last sample says why no more come"
    assert server.wait_exit() == 0
