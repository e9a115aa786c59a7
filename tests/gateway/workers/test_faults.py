"""Processes of a server with two HTTP workers end, and requests go on or say why not."""

import asyncio
import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.gateway.workers.servers import PROMPT, WORKERS, Reader, count, read_all
from tests.server_process import MODEL, ServerProcess, StartServer, running_command, running_server
from tests.waiting import PATIENCE_S, until


class Load:
    """Clients that ask again and again, whole and streamed, until they are stopped."""

    def __init__(self, server: ServerProcess) -> None:
        self.num_answers = 0
        self.failures: list[str] = []
        self._url = server.base_url
        self._is_stopped = False

    async def run(self, num_clients: int) -> None:
        async with httpx.AsyncClient(base_url=self._url, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(self._ask(client, is_streamed=bool(i % 2)) for i in range(num_clients)))

    async def _ask(self, client: httpx.AsyncClient, *, is_streamed: bool) -> None:
        while not self._is_stopped:
            try:
                answer = await client.post("/v1/completions", json={**PROMPT, "stream": is_streamed})
            except httpx.HTTPError as error:
                self.failures.append(repr(error))
                continue
            is_whole = not is_streamed or answer.text.endswith("data: [DONE]\n\n")
            if answer.status_code == 200 and is_whole:
                self.num_answers += 1
            else:
                self.failures.append(f"{answer.status_code} {answer.text[:200]}")

    def stop(self) -> None:
        self._is_stopped = True


@pytest.fixture(scope="module")
def enduring(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that it outlives."""
    options = (
        WORKERS,
        "--dtype=f32",
        "--engine-heartbeat-timeout-secs=4",
        "--exit-timeout-secs=1",
        "--stream-resume-secs=60",
    )
    with running_server(checkpoint, tmp_path_factory.mktemp("enduring") / "log", *options) as running:
        running.wait_ready()
        yield running


async def test_a_rolling_restart_fails_no_request(enduring: ServerProcess) -> None:
    server = enduring
    before, num_before = {each.pid for each in server.workers()}, count(server, "sluice_requests_total")
    load = Load(server)
    running = asyncio.create_task(load.run(8))
    await until(lambda: load.num_answers > 20)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=4 * PATIENCE_S) as client:
        long = {**PROMPT, "max_tokens": 3000, "stream": True}
        streams = [asyncio.create_task(client.post("/v1/completions", json=long)) for _ in range(4)]
        await until(lambda: count(server, "sluice_sequences_running") >= 4)
        server.process.send_signal(signal.SIGHUP)
        answers = await asyncio.gather(*streams)
        assert all(each.text.endswith("data: [DONE]\n\n") for each in answers)
    await until(lambda: "all 2 HTTP workers are replaced" in server.log)
    num_answers = load.num_answers
    await until(lambda: load.num_answers > num_answers + 20)
    load.stop()
    await running
    assert not load.failures
    await until(lambda: len(server.workers()) == 2)
    assert before.isdisjoint(each.pid for each in server.workers())
    # What the old workers counted is there, too.
    num_expected = num_before + load.num_answers + len(answers)
    await until(lambda: count(server, "sluice_requests_total") == num_expected)


@pytest.mark.parametrize(
    ("end", "has_successor"),
    [(psutil.Process.kill, False), (psutil.Process.kill, True), (psutil.Process.suspend, False)],
)
async def test_a_lost_worker_is_replaced_and_the_port_answers_meanwhile(
    enduring: ServerProcess, end: Callable[[psutil.Process], None], has_successor: bool
) -> None:
    server = enduring
    losses, requests = count(server, "sluice_http_worker_losses_total"), count(server, "sluice_requests_total")
    async with httpx.AsyncClient(base_url=server.base_url, timeout=PATIENCE_S) as client:
        victim = min(server.workers(), key=lambda each: int(each.cmdline()[-1]))  # the first to be replaced
        if has_successor:
            server.process.send_signal(signal.SIGHUP)
            await until(lambda: len(server.workers()) == 3)
        end(victim)
        await until(lambda: count(server, "sluice_http_worker_losses_total") == losses + 1)
        for _ in range(8):
            headers = {"connection": "close"}  # a connection of its own, some of which the lost one would have had
            assert (await client.post("/v1/completions", json=PROMPT, headers=headers)).status_code == 200
        await until(lambda: len(server.workers()) == count(server, "sluice_http_workers") == 2)
        assert victim.pid not in {each.pid for each in server.workers()}
    await until(lambda: count(server, "sluice_requests_total") == requests + 8)


async def test_a_worker_that_hangs_as_it_is_replaced_is_ended(enduring: ServerProcess) -> None:
    victim = enduring.workers()[0]
    victim.suspend()
    enduring.process.send_signal(signal.SIGHUP)
    await until(lambda: not victim.is_running())
    await until(lambda: len(enduring.workers()) == count(enduring, "sluice_http_workers") == 2)


async def test_a_resumable_stream_outlives_the_worker_that_it_came_through(enduring: ServerProcess) -> None:
    body = {**PROMPT, "max_tokens": 3000, "stream": True}
    async with httpx.AsyncClient(base_url=enduring.base_url, timeout=PATIENCE_S) as client:
        expected = texts_of((await client.post("/v1/completions", json=body)).text)
        got = ""
        with pytest.raises(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/completions", json=body, headers={"x-sluice-resume": "true"}) as cut:
                async for text in cut.aiter_text():
                    got += text
                    for each in enduring.workers():
                        each.kill()
        whole = got[: got.rindex("\n\n") + 2]
        last = re.findall(r"^id: (\S+)$", whole, re.MULTILINE)[-1]
        rest = await client.get(f"/v1/streams/{cut.headers['x-sluice-stream']}", headers={"last-event-id": last})
        assert texts_of(whole + rest.text) == expected
    await until(lambda: count(enduring, "sluice_http_workers") == 2)


def texts_of(events: str) -> str:
    """The text of a streamed completion."""
    assert events.endswith("data: [DONE]\n\n")
    chunks = [json.loads(each) for each in re.findall(r"^data: (\{.*)$", events, re.MULTILINE)]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


async def test_streams_of_workers_go_on_when_the_engine_is_killed(enduring: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=enduring.base_url, timeout=2 * PATIENCE_S) as client:
        expected = await read_all(client, [Reader(number) for number in range(8)])
        readers = [Reader(number) for number in range(8)]
        reading = asyncio.gather(*(reader.read(client) for reader in readers))
        await asyncio.gather(*(reader.is_under_way.wait() for reader in readers))
        enduring.engine().kill()
        assert await reading == expected
        lost: list[dict[str, str]] = []
        async with asyncio.timeout(PATIENCE_S):  # the streams may have ended before the kill is noticed
            while {line["process"] for line in lost} != {"worker-1", "worker-2"}:
                logged = await client.get("/v1/admin/logs", params={"level": "error"})
                lost = [line for line in logged.json()["data"] if line["logger"] == "sluice.engine.client.attached"]
                await asyncio.sleep(0.05)
    assert all("requests wait" in line["message"] and line["request_id"] == "-" for line in lost)


async def test_a_model_is_unloaded_after_the_streams_of_the_workers(checkpoint: Path, tmp_path: Path) -> None:
    shutil.copytree(checkpoint, tmp_path / "models" / MODEL / "1")
    arguments = (f"--model-repository={tmp_path / 'models'}", "--model-control-mode=explicit", f"--load-model={MODEL}")
    with running_command(tmp_path / "log", *arguments, WORKERS) as server:
        await asyncio.to_thread(server.wait_ready)
        async with httpx.AsyncClient(base_url=server.base_url, timeout=PATIENCE_S) as client:

            async def status() -> int:
                return (await client.post("/v1/completions", json=PROMPT)).status_code

            for _ in range(2):
                readers = [Reader(number) for number in range(4)]
                reading = asyncio.gather(*(reader.read(client) for reader in readers))
                await asyncio.gather(*(reader.is_under_way.wait() for reader in readers))
                engine = server.engine()
                (await client.post(f"/v2/repository/models/{MODEL}/unload")).raise_for_status()
                await reading  # each to its end
                await until(lambda engine=engine: not engine.is_running())
                assert await status() == 404
                (await client.post(f"/v2/repository/models/{MODEL}/load")).raise_for_status()
                assert await status() == 200
            before = count(server, "sluice_requests_total")
            await asyncio.sleep(1)  # the workers have it again
            host = psutil.Process(server.pid)
            host.suspend()
            try:
                assert await status() == 200
            finally:
                host.resume()
            await until(lambda: count(server, "sluice_requests_total") == before + 1)


async def test_a_server_ends_with_its_open_streams_and_leaves_no_process(start_server: StartServer) -> None:
    server = await asyncio.to_thread(start_server, WORKERS)
    children = psutil.Process(server.pid).children(recursive=True)
    async with httpx.AsyncClient(base_url=server.base_url, timeout=PATIENCE_S) as client:
        readers = [Reader(number) for number in range(4)]
        reading = asyncio.gather(*(reader.read(client) for reader in readers))
        await asyncio.gather(*(reader.is_under_way.wait() for reader in readers))
        server.process.send_signal(signal.SIGTERM)
        await reading  # each to its end
    assert await asyncio.to_thread(server.wait_exit) == 0
    assert not [each for each in children if each.is_running()]


async def test_nothing_outlives_a_host_that_is_killed_not_even_what_is_stopped(start_server: StartServer) -> None:
    server = await asyncio.to_thread(start_server, WORKERS)
    children = psutil.Process(server.pid).children(recursive=True)
    assert len(children) >= 3
    body = {**PROMPT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with (
        httpx.AsyncClient(base_url=server.base_url, timeout=PATIENCE_S) as client,
        client.stream("POST", "/v1/completions", json=body) as answer,
    ):
        lines = answer.aiter_lines()
        assert "error" not in await anext(lines)
        client_port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
        for each in children:
            if client_port not in {found.raddr.port for found in each.net_connections("tcp") if found.raddr}:
                each.suspend()
        server.process.kill()
        rest = "".join([line async for line in lines])
    assert "the server was lost while it answered: send the request again" in rest
    await until(lambda: not any(each.is_running() and each.status() != "zombie" for each in children))
