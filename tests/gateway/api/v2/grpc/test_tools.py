"""Stock tools against the server: other implementations of HTTP/2, and gRPC's blocking client."""

import asyncio
import re
import shutil
from pathlib import Path

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.gateway.api.v2.grpc.http2.client import message
from tests.gateway.api.v2.grpc.parts import serving
from tests.gateway.api.v2.small_service import SmallService
from tests.waiting import PATIENCE_S

LIVE = "/inference.GRPCInferenceService/ServerLive"
HEADERS = ("-H", "content-type: application/grpc", "-H", "te: trailers")


async def run(name: str, *arguments: str) -> str:
    """Run a tool, and return all that it prints. Skips the test where there is none."""
    if (path := shutil.which(name)) is None:
        pytest.skip(f"this machine has no {name}")
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(path, *arguments, stdout=pipe, stderr=asyncio.subprocess.STDOUT)
    async with asyncio.timeout(PATIENCE_S):
        printed, _ = await process.communicate()
    assert process.returncode == 0, printed
    return printed.decode("utf-8", "replace")


@pytest.fixture
def body(tmp_path: Path) -> Path:
    """A file with the message of a call without parameters."""
    path = tmp_path / "body"
    path.write_bytes(message(b""))
    return path


async def test_curl(body: Path, tmp_path: Path) -> None:
    async with serving(SmallService()) as running:
        answer = tmp_path / "answer"
        printed = await run(
            *("curl", "--http2-prior-knowledge", "-sS", "-D", "-", "-o", str(answer), "--data-binary", f"@{body}"),
            *(*HEADERS, f"http://{running.target}{LIVE}"),
        )
        assert re.search(r"^HTTP/2 200", printed) and re.search(r"^grpc-status: 0", printed, re.MULTILINE)
        assert answer.read_bytes() == message(pb.ServerLiveResponse(live=True).SerializeToString())
        printed = await run("curl", "-sS", "-i", f"http://{running.target}/v2/health/live")
        assert printed.startswith("HTTP/1.1 505") and "HTTP/1.1 is spoken on the port of --http-port" in printed


async def test_nghttp2(body: Path) -> None:
    async with serving(SmallService()) as running:
        url = f"http://{running.target}{LIVE}"
        printed = await run("nghttp", "-v", "-d", str(body), *HEADERS, url)
        assert "recv GOAWAY" not in printed and "grpc-status: 0" in printed
        printed = await run("h2load", "-n100", "-c2", "-m10", "-d", str(body), *HEADERS, url)
        assert "100 total, 100 started, 100 done, 100 succeeded, 0 failed, 0 errored, 0 timeout" in printed


async def test_the_clients_of_grpc() -> None:
    def ask(target: str) -> list[bool]:
        with grpc.insecure_channel(target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return [stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live for _ in range(20)]

    async with serving(SmallService()) as running:
        assert await asyncio.to_thread(ask, running.target) == [True] * 20
        asked = [running.stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S) for _ in range(500)]
        assert all([(await each).live for each in asked])
