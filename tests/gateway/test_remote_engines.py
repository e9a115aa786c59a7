"""A real gateway whose engines are other processes, named in a file: none at first, then one, then none again."""

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.paths import ROOT
from tests.server_process import MODEL, ServerProcess, running_server
from tests.waiting import PATIENCE_S, until

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4}
KEEP_ALIVE = "--sse-keep-alive-secs=0.2"
CHAT_PATH = "/v1/chat/completions"


@contextmanager
def remote_engine(checkpoint: Path) -> Iterator[tuple[str, "subprocess.Popen[str]"]]:
    """Run an engine process, which has no time to end requests at SIGTERM. Yields its address with it."""
    listen = ("--listen=tcp://127.0.0.1:0", "--dtype=f32", "--exit-timeout-secs=0")
    words = (sys.executable, "-m", "sluice.cli", "engine", str(checkpoint), *listen)
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert process.stdout is not None
        ready = process.stdout.readline()
        found = re.search(r"ready at (tcp://\S+)", ready)
        assert found is not None, ready
        yield found[1], process
    finally:
        process.kill()
        process.communicate()


def name_engines(path: Path, *addresses: str) -> None:
    """Write the file of engines, whole at once."""
    engines = [{"name": f"e{number}", "address": address} for number, address in enumerate(addresses)]
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"engines": engines}))
    fresh.replace(path)


@pytest.fixture(scope="module", params=[(), ("--http-workers=2",)], ids=["one process", "workers"])
def options(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = request.param
    return found


@pytest.fixture(scope="module")
def engines_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("engines") / "engines.yaml"


@pytest.fixture(scope="module")
def gateway(
    checkpoint: Path, engines_file: Path, options: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    name_engines(engines_file)
    own = (f"--engines={engines_file}", "--wake-timeout-secs=90", "--wake-max-requests=2", KEEP_ALIVE)
    with running_server(checkpoint, tmp_path_factory.mktemp("gateway") / "log", *own, *options) as running:
        running.wait_ready()
        yield running


def connect(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.base_url, timeout=4 * PATIENCE_S)


async def pressure(client: httpx.AsyncClient, server: ServerProcess) -> float:
    page = (await client.get(server.metrics_url)).text
    [value] = re.findall(r"^sluice_scale_pressure{.*} (.*)$", page, re.MULTILINE)
    return float(value)


async def health(client: httpx.AsyncClient) -> str:
    response = await client.get("/health")
    assert response.status_code == 200, response.text
    return "; ".join(response.json().get("degraded", ()))


async def until_health(client: httpx.AsyncClient, words: str) -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        while words not in await health(client):
            await asyncio.sleep(0.05)


async def until_ready(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(2 * PATIENCE_S):
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.05)


async def refused(client: httpx.AsyncClient, status: int, headers: dict[str, str] | None = None) -> httpx.Response:
    response = await client.post(CHAT_PATH, json=CHAT, headers=headers)
    assert response.status_code == status, response.text
    return response


async def test_a_fleet_sleeps_wakes_for_requests_and_sleeps_again(
    gateway: ServerProcess, engines_file: Path, checkpoint: Path
) -> None:
    async with connect(gateway) as client:
        assert await health(client) == f"{MODEL} is asleep: it has no engine until requests come"
        assert (await client.get("/v2/health/ready")).status_code == 200
        assert await pressure(client, gateway) == 0.0
        late = await refused(client, 504, {"x-sluice-timeout-ms": "50"})
        assert "waited 0.05 s for an engine to start" in late.text
        generate: dict[str, Any] = {"text_input": "Hi.", "max_tokens": 4}
        held = [
            asyncio.create_task(client.post(CHAT_PATH, json=CHAT | {"stream": True})),
            asyncio.create_task(client.post(f"/v2/models/{MODEL}/generate", json=generate)),
        ]
        await until_health(client, f"{MODEL} is waking: 2 requests wait for its first engine")
        assert await pressure(client, gateway) == 2.0
        full = await refused(client, 429)
        assert 1 <= int(full.headers["retry-after"]) <= 60
        with remote_engine(checkpoint) as (address, _):
            name_engines(engines_file, address)
            streamed, whole = await asyncio.gather(*held)
            assert (streamed.status_code, whole.status_code) == (200, 200)
            assert streamed.text.startswith(": keep-alive\n\n: keep-alive\n\n") and "[DONE]" in streamed.text
            assert (await client.post(CHAT_PATH, json=CHAT)).json()["usage"]["completion_tokens"] == 4
            assert await health(client) == ""
            assert await pressure(client, gateway) < 1.0
            name_engines(engines_file)
            await until_health(client, "asleep")
            assert await pressure(client, gateway) == 0.0
            again = await until_held(client)
            name_engines(engines_file, address)
            assert (await again).status_code == 200
            if gateway.workers():
                await until_workers_answer(client, gateway)


async def until_held(client: httpx.AsyncClient) -> "asyncio.Task[httpx.Response]":
    """Return a request that is held. A worker hears a moment later than the host that an engine is named no more."""
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            asked = asyncio.create_task(client.post(CHAT_PATH, json=CHAT))
            while not asked.done():
                if "1 requests wait" in await health(client):
                    return asked
                await asyncio.sleep(0.05)
            assert asked.result().status_code == 200


async def until_workers_answer(client: httpx.AsyncClient, gateway: ServerProcess) -> None:
    """Wait until requests are answered while the host does not run: by workers that are linked to the engines."""
    host = psutil.Process(gateway.pid)
    async with asyncio.timeout(2 * PATIENCE_S):
        while True:
            host.suspend()
            try:
                for _ in range(6):  # each on a connection of its own, so that both workers have some
                    async with httpx.AsyncClient(base_url=gateway.base_url, timeout=2.0) as other:
                        assert (await other.post(CHAT_PATH, json=CHAT)).status_code == 200
                return
            except httpx.TimeoutException:
                pass
            finally:
                host.resume()
            await until_ready(client)  # a host that did not run finds its engine anew


async def read_stream(client: httpx.AsyncClient, lines: list[str]) -> None:
    """Read a long greedy stream into `lines`."""
    body = CHAT | {"max_tokens": 2000, "ignore_eos": True, "temperature": 0, "stream": True}
    async with client.stream("POST", CHAT_PATH, json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                lines.append(line)


def text_of(lines: list[str]) -> str:
    assert lines[-1] == "data: [DONE]", lines[-1]
    choices = [json.loads(line.removeprefix("data: "))["choices"] for line in lines[:-1]]
    return "".join(each[0]["delta"].get("content") or "" for each in choices if each)


async def test_a_stream_of_the_only_engine_goes_on_in_its_successor(
    gateway: ServerProcess, engines_file: Path, checkpoint: Path
) -> None:
    """The successor is started after the engine has ended, as an upgrade without a second place does."""
    async with connect(gateway) as client:
        begun, expected = list[str](), list[str]()
        with remote_engine(checkpoint) as (address, process):
            name_engines(engines_file, address)
            assert (await client.post(CHAT_PATH, json=CHAT)).status_code == 200
            reading = asyncio.create_task(read_stream(client, begun))
            await until(lambda: len(begun) >= 4)
            process.terminate()
            assert await asyncio.to_thread(process.wait) == 0
            assert not reading.done(), f"the engine had no time to end it: {begun[-2:]}"
        with remote_engine(checkpoint) as (address, _):
            name_engines(engines_file, address)
            async with asyncio.timeout(2 * PATIENCE_S):
                await reading
            await read_stream(client, expected)
            assert text_of(begun) == text_of(expected)
        name_engines(engines_file)
