"""The command `sluice engine`: a real process with the bundled model, asked over TCP, watched, killed and ended."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from sluice.cli.engine import command
from sluice.engine.client.attached import AttachedEngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.fleet.membership.fleet_url import FleetUrl
from sluice.engine.fleet.membership.members import Member
from sluice.engine.fleet.membership.redis_leases import RedisMembership
from sluice.engine.process.curve import ClientCurve, read_pair, read_public
from sluice.errors import ErrorCode
from tests.engine.client.test_recovery import collect, failure_of
from tests.engine.parts import make_request
from tests.server_process import start_command
from tests.serving.caching.parts import RedisServer
from tests.waiting import PATIENCE_S, until


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@asynccontextmanager
async def engine_process(folder: Path, *arguments: str) -> AsyncIterator[tuple["subprocess.Popen[str]", str]]:
    """The process, with its ready line."""
    with (folder / "log").open("w") as log:
        process = start_command([sys.executable, "-m", "sluice.cli", "engine", *arguments], log)
    try:
        assert process.stdout is not None
        yield process, await asyncio.to_thread(process.stdout.readline)
    finally:
        process.kill()
        await asyncio.to_thread(process.communicate)


async def exit_code(process: "subprocess.Popen[str]") -> int:
    return await asyncio.to_thread(process.wait, PATIENCE_S)


@pytest.mark.long
@pytest.mark.slow
async def test_an_engine_serves_is_replaced_and_drains(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys, allowed, port = tmp_path / "keys", tmp_path / "allowed", free_port()
    for name in ("engine", "gateway"):
        assert command(["keys", str(keys), "--name", name]) == 0
    assert capsys.readouterr().out.splitlines()[0] == str(keys / "engine.key")
    allowed.mkdir()
    (allowed / "gateway.key").write_bytes((keys / "gateway.key").read_bytes())
    curve = ClientCurve(read_pair(keys / "gateway.key_secret"), read_public(keys / "engine.key"))
    secret = str(keys / "engine.key_secret")
    options = ("--listen", "tcp://127.0.0.1:0", "--curve-key", secret, "--allowed-clients", str(allowed))
    async with engine_process(
        tmp_path, *options, "--health-port", str(port), "--exit-timeout-secs", "80", "--num-blocks", "64"
    ) as (process, ready):
        found = re.fullmatch(
            r"engine of rill ready at (tcp://\S+) \(openvino, \w+, 64 blocks of \d+ tokens\); .*\n", ready
        )
        assert found is not None, ready
        client = AttachedEngineClient(EngineConfig(model_path=""), found[1], curve=curve)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as http:
            try:
                await client.start()
                assert client.info.num_blocks == 64
                tokens = await collect(client.submit(make_request([5, 6, 7], "a", max_tokens=8, ignore_eos=True)))
                assert (await http.get("/health/live")).status_code == 200
                assert (await http.get("/health/ready")).status_code == 200
                assert (await http.get("/metrics", headers={"host": "evil.example"})).status_code == 403
                assert 'sluice_kv_blocks{model="rill"} 64.0' in (await http.get("/metrics")).text
                page = await http.get("/metrics", headers={"accept": "application/openmetrics-text;version=1.0.0"})
                assert "sluice_kv_blocks" in {each.name for each in text_string_to_metric_families(page.text)}  # type: ignore[no-untyped-call]
                [child] = [
                    each for each in psutil.Process(process.pid).children() if "sluice.engine.process" in each.cmdline()
                ]
                os.kill(child.pid, signal.SIGKILL)
                await until(lambda: client.is_restarting)
                again = await collect(client.submit(make_request([5, 6, 7], "b", max_tokens=8, ignore_eos=True)))
                assert again == tokens
                running = client.submit(make_request([5, 6, 7], "c", max_tokens=300, ignore_eos=True))
                await until(lambda: bool(running.output_token_ids))
                process.send_signal(signal.SIGTERM)
                await until(lambda: client.stats.is_draining)
                refused = await failure_of(client.submit(make_request([5], "d")))
                assert refused.code is ErrorCode.UNAVAILABLE
                assert len(await collect(running)) == 300
                assert await exit_code(process) == 0
            finally:
                await client.stop()


def test_keys_are_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["keys", str(tmp_path), "--name", "a"]) == 0
    assert command(["keys", str(tmp_path), "--name", "a"]) == 1
    assert "is there already; keys are never replaced" in capsys.readouterr().err


async def test_an_engine_registers_itself_while_it_runs(tmp_path: Path) -> None:
    redis = RedisServer(tmp_path)
    await redis.start()
    try:
        url = FleetUrl.parse(f"redis://127.0.0.1:{redis.port}/0#rill")
        members = RedisMembership(url).watch()
        named = ("--register", f"{url.redis}#rill", "--register-version", "new", "--advertise", "localhost")
        options = ("--listen", "tcp://127.0.0.1:0", *named, "--num-blocks", "64")
        async with engine_process(tmp_path, *options) as (process, ready):
            port = re.findall(r"tcp://127.0.0.1:(\d+)", ready)[0]
            async with asyncio.timeout(PATIENCE_S):
                [member] = await anext(members)
            assert member == Member(name=f"localhost:{port}", address=f"tcp://localhost:{port}", version="new")
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                assert await anext(members) == ()
            assert await exit_code(process) == 0
        await members.aclose()  # type: ignore[attr-defined]  # it is a generator
    finally:
        redis.kill()
