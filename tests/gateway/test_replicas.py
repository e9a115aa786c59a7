"""`sluice serve MODEL --replicas 2`: a real server whose replicas are killed and stopped under streams of all kinds."""

import asyncio
import json
import re
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server_process import MODEL, ServerProcess, running_server
from tests.waiting import PATIENCE_S, until

NUM_STREAMS = 32
MAX_TOKENS = 160
BEFORE_LOSS = 3
"""Events that a stream has received when the replica is lost."""
_SCHEMA = {
    "type": "object",
    "properties": {"names": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 8}},
    "required": ["names"],
    "additionalProperties": False,
}
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 5, "ignore_eos": True},
    {"temperature": 1.0, "seed": 7, "n": 4, "ignore_eos": True},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "names", "schema": _SCHEMA}}},
    {"temperature": 1.0, "seed": 9, "logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    {"temperature": 1.0, "seed": 11, "stop": ["qxq"], "ignore_eos": True},
    {"temperature": 0.8, "seed": 13, "presence_penalty": 0.5, "frequency_penalty": 0.5, "ignore_eos": True},
    {"temperature": 0, "min_tokens": 100},
)
MOVED = "requests go on elsewhere"
ATTEMPTS = 10
"""Losses until one comes while streams run: a reader may hear of them when the engine is done."""


class Reader:
    """One client of a streamed chat."""

    def __init__(self, number: int) -> None:
        kind = _KINDS[number % len(_KINDS)]
        messages = [{"role": "user", "content": f"Tell me story number {number}."}]
        self._body = {"model": MODEL, "messages": messages, "max_tokens": MAX_TOKENS, "stream": True, **kind}
        self.is_under_way = asyncio.Event()

    async def read(self, client: httpx.AsyncClient) -> list[Any]:
        """Return text, log probabilities and finish reason of each choice."""
        choices: dict[int, list[Any]] = {}
        num_events, last = 0, ""
        async with client.stream("POST", "/v1/chat/completions", json=self._body) as response:
            assert response.status_code == 200, await response.aread()
            async for line in response.aiter_lines():
                if not line.startswith("data: "):  # in a long silence comments keep the connection
                    continue
                last, num_events = line, num_events + 1
                if num_events > BEFORE_LOSS:
                    self.is_under_way.set()
                if line != "data: [DONE]":
                    self._take(json.loads(line.removeprefix("data: ")), choices)
        self.is_under_way.set()
        assert last == "data: [DONE]"
        return [choices[index] for index in sorted(choices)]

    @staticmethod
    def _take(chunk: dict[str, Any], choices: dict[int, list[Any]]) -> None:
        assert "choices" in chunk, chunk
        for choice in chunk["choices"]:
            found = choices.setdefault(choice["index"], ["", [], None])
            found[0] += choice["delta"].get("content") or ""
            found[1] += [token["token"] for token in (choice.get("logprobs") or {}).get("content") or ()]
            found[2] = choice["finish_reason"] or found[2]


async def read_all(client: httpx.AsyncClient, readers: list[Reader]) -> list[list[Any]]:
    return await asyncio.gather(*(reader.read(client) for reader in readers))


def connect(server: ServerProcess) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=NUM_STREAMS + 4)
    return httpx.AsyncClient(base_url=server.base_url, timeout=8 * PATIENCE_S, limits=limits)


async def until_whole(client: httpx.AsyncClient) -> None:
    """Wait until all replicas serve."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while (await client.get("/health")).json() != {"status": "ok"}:
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module", params=[(), ("--http-workers=2",)], ids=["one process", "workers"])
def replicated(
    request: pytest.FixtureRequest, checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    options = ("--replicas=2", "--dtype=f32", "--max-num-seqs=8", "--engine-heartbeat-timeout-secs=6", *request.param)
    options += ("--session-bonus-secs=60",)  # on a machine under load rates are as they come
    with running_server(checkpoint, tmp_path_factory.mktemp("replicas") / "log", *options) as running:
        running.wait_ready()
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_of_all_kinds_bring_the_same_when_a_replica_is_lost(
    replicated: ServerProcess, number: signal.Signals
) -> None:
    before = replicated.log.count(MOVED)
    async with connect(replicated) as client:
        undisturbed = await read_all(client, [Reader(each) for each in range(NUM_STREAMS)])
        for _ in range(ATTEMPTS):
            readers = [Reader(each) for each in range(NUM_STREAMS)]
            reading = asyncio.create_task(read_all(client, readers))
            begun = [asyncio.create_task(each.is_under_way.wait()) for each in readers]
            await asyncio.wait(begun, return_when=asyncio.FIRST_COMPLETED)  # to slow readers all may come late
            lost, kept = replicated.engines()
            lost.send_signal(number)
            assert await reading == undisturbed
            assert kept.is_running()
            await until_whole(client)
            if replicated.log.count(MOVED) > before:
                return
    pytest.fail(f"in {ATTEMPTS} attempts the streams had all ended when the replica did")


CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 1}
_TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["Hi."]}
_ROUTED = re.compile(r'^sluice_replica_requests_routed_total{.*replica="(\d)"} (.*)$', re.MULTILINE)
_LOST = re.compile(r'^sluice_replica_up{.*replica="(\d)".*} 0', re.MULTILINE)


def naming_bodies(session: str) -> list[tuple[str, dict[str, Any]]]:
    """Requests whose body names a session, each with its path."""
    return [
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": session, "user": "another"}),
        ("/v1/chat/completions", CHAT | {"user": session}),
        ("/v1/messages", CHAT | {"metadata": {"user_id": session}}),
        ("/v1/messages", CHAT | {"metadata": {"user_id": f"user_1_account_2_session_{session}"}}),
        (f"/v2/models/{MODEL}/infer", {"inputs": [_TEXT], "parameters": {"sequence_id": session}}),
    ]


class Homes:
    """Tells which replica gets each request."""

    def __init__(self, server: ServerProcess, client: httpx.AsyncClient) -> None:
        self._server = server
        self._client = client

    async def of(self, session: str = "", path: str = "/v1/chat/completions", body: dict[str, Any] = CHAT) -> str:
        """Return the replica that got this request, whose `session` is in a header."""
        before = await self._count()
        response = await self._client.post(path, json=body, headers={"x-session-id": session} if session else {})
        assert response.status_code == 200, response.text
        async with asyncio.timeout(PATIENCE_S):
            while not (home := (await self._count()) - before):  # the counts of workers come later
                await asyncio.sleep(0.05)
        [name] = home
        return name

    async def lost(self) -> list[str]:
        """Return the replicas that take no requests."""
        return _LOST.findall((await self._client.get(self._server.metrics_url)).text)

    async def _count(self) -> Counter[str]:
        page = (await self._client.get(self._server.metrics_url)).text
        return Counter({name: int(float(value)) for name, value in _ROUTED.findall(page)})


async def test_the_requests_of_a_session_go_to_one_replica(replicated: ServerProcess) -> None:
    async with connect(replicated) as client:
        await until_whole(client)
        homes = Homes(replicated, client)
        found = {session: {await homes.of(session) for _ in range(2)} for session in "abcdef"}
        assert sorted(map(sorted, {frozenset(each) for each in found.values()})) == [["0"], ["1"]], found
        for session in ("a", next(each for each in found if found[each] != found["a"])):
            for path, body in naming_bodies(session):
                assert {await homes.of(path=path, body=body)} == found[session], path


async def test_a_session_whose_replica_is_lost_hears_that_its_prompt_was_there(replicated: ServerProcess) -> None:
    if replicated.workers():
        pytest.skip("each worker hears of a loss by itself")

    def sent(session: str) -> dict[str, Any]:
        text = f"{session} and the gate of a sluice " * 12
        return CHAT | {"messages": [{"role": "user", "content": text}], "prompt_cache_key": session}

    async with connect(replicated) as client:
        await until_whole(client)
        homes = Homes(replicated, client)
        found = {session: await homes.of(body=sent(session)) for session in "abcdef"}
        replicated.engines()[0].kill()  # which of the replicas that is, the metrics say
        [lost] = await until(homes.lost)
        misses = []
        for session in (next(each for each in found if (found[each] == lost) is is_lost) for is_lost in (True, False)):
            answer = (await client.post("/v1/chat/completions", json=sent(session))).json()
            misses.append(answer["usage"]["prompt_tokens_details"].get("cache_miss"))
        assert (misses[0]["reason"], misses[0]["before"], misses[1]) == ("another_replica", lost, None)


async def test_it_is_ready_and_answers_while_one_replica_is_gone(replicated: ServerProcess) -> None:
    async with connect(replicated) as client:
        await until_whole(client)
        first, _ = replicated.engines()
        first.kill()
        assert (await client.get("/v2/health/ready")).status_code == 200
        assert await Reader(0).read(client)
        metrics = (await client.get(replicated.metrics_url)).text
        assert 'sluice_engine_restarts_total{model="tiny"}' in metrics
