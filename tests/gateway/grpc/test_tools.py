"""Stock tools against the server: other implementations of HTTP/2, and the usual clients of gRPC."""

import asyncio
import re
import shutil
from pathlib import Path

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

from tests.gateway.grpc.http2.client import message
from tests.gateway.grpc.parts import EchoModel, serving
from tests.gateway.v2.small_service import SmallService
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


@pytest.mark.parametrize("server_name", ["sluice"], indirect=True)
async def test_curl_by_http1(server_name: str) -> None:
    async with serving(SmallService()) as running:
        printed = await run("curl", "-sS", "-i", f"http://{running.target}/v2/health/live")
        assert printed.startswith("HTTP/1.1 505") and "HTTP/1.1 is spoken on the port of --http-port" in printed


async def test_h2load(body: Path) -> None:
    async with serving(SmallService()) as running:
        printed = await run(
            "h2load", "-n100", "-c2", "-m10", "-d", str(body), *HEADERS, f"http://{running.target}{LIVE}"
        )
        assert "100 total, 100 started, 100 done, 100 succeeded, 0 failed, 0 errored, 0 timeout" in printed
        assert "status codes: 100 2xx, 0 3xx, 0 4xx, 0 5xx" in printed


async def test_nghttp(body: Path) -> None:
    async with serving(SmallService()) as running:
        printed = await run("nghttp", "-v", "-d", str(body), *HEADERS, f"http://{running.target}{LIVE}")
        assert "recv GOAWAY" not in printed and "grpc-status: 0" in printed


async def test_the_synchronous_client_of_grpc() -> None:
    def ask(target: str) -> list[bool]:
        with grpc.insecure_channel(target) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return [stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S).live for _ in range(20)]

    async with serving(SmallService()) as running:
        assert await asyncio.to_thread(ask, running.target) == [True] * 20


async def test_many_calls_at_a_time() -> None:
    async with serving(SmallService()) as running:
        asked = [running.stub.ServerLive(pb.ServerLiveRequest(), timeout=PATIENCE_S) for _ in range(500)]
        assert all([(await each).live for each in asked])


async def test_the_synchronous_client_of_triton() -> None:
    def infer(target: str) -> list[int]:
        with tritonclient.grpc.InferenceServerClient(target) as client:
            tensor = tritonclient.grpc.InferInput("INPUT0", [3], "INT32")
            tensor.set_data_from_numpy(np.array([1, 2, 3], np.int32))
            found: list[int] = client.infer("echo", [tensor]).as_numpy("OUTPUT0").tolist()
            return found

    async with serving(SmallService(EchoModel())) as running:
        assert await asyncio.to_thread(infer, running.target) == [1, 2, 3]


async def test_the_asynchronous_client_of_triton() -> None:
    async with (
        serving(SmallService(EchoModel())) as running,
        tritonclient.grpc.aio.InferenceServerClient(running.target) as client,
    ):
        tensor = tritonclient.grpc.aio.InferInput("INPUT0", [3], "INT32")
        tensor.set_data_from_numpy(np.array([1, 2, 3], np.int32))
        for _ in range(3):
            assert (await client.infer("echo", [tensor])).as_numpy("OUTPUT0").tolist() == [1, 2, 3]
