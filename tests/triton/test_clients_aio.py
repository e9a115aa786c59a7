"""tritonclient's asyncio libraries."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc.aio
import tritonclient.http.aio
from tritonclient.utils import InferenceServerException

from tests.server_process import ServerProcess
from tests.triton.clients import GRPC, HTTP, Library, text
from tests.triton.held import Hold
from tests.triton.server import http_address

LEFT = np.arange(4, dtype=np.float32).reshape(1, 4)


@pytest.fixture
async def aio_client(library: Library, triton: ServerProcess) -> AsyncIterator[Any]:
    if library is HTTP:
        client = tritonclient.http.aio.InferenceServerClient(http_address(triton))
    else:
        client = tritonclient.grpc.aio.InferenceServerClient(triton.grpc_address)
    yield client
    await client.close()


def pair(library: Library) -> list[Any]:
    return [library.tensor("INPUT0", LEFT), library.tensor("INPUT1", LEFT)]


async def test_descriptions(aio_client: Any, library: Library) -> None:
    assert await aio_client.is_server_live()
    assert await aio_client.is_server_ready()
    assert await aio_client.is_model_ready("add_sub")
    metadata = await aio_client.get_model_metadata("versioned", **library.as_json)
    assert metadata["versions"] == ["1", "2"]


async def test_many_requests_at_once(aio_client: Any, library: Library) -> None:
    results = await asyncio.gather(*(aio_client.infer("add_sub", pair(library)) for _ in range(64)))
    for result in results:
        np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + LEFT)


async def test_errors(aio_client: Any, library: Library) -> None:
    with pytest.raises(InferenceServerException, match="unknown model: 'nope'"):
        await aio_client.infer("nope", pair(library))


async def test_load_and_unload(aio_client: Any) -> None:
    await aio_client.load_model("on_demand")
    assert await aio_client.is_model_ready("on_demand")
    await aio_client.unload_model("on_demand")
    assert not await aio_client.is_model_ready("on_demand")


async def test_http_compression(triton: ServerProcess) -> None:
    async with tritonclient.http.aio.InferenceServerClient(http_address(triton)) as client:
        result = await client.infer(
            "add_sub", pair(HTTP), request_compression_algorithm="gzip", response_compression_algorithm="deflate"
        )
    np.testing.assert_array_equal(result.as_numpy("OUTPUT0"), LEFT + LEFT)


async def test_stream(triton: ServerProcess) -> None:
    async def requests() -> AsyncIterator[dict[str, Any]]:
        for name in ("one", "two"):
            words = [GRPC.tensor("text_input", text(b"a b")), GRPC.tensor("max_tokens", np.array([3], np.int32))]
            yield {"model_name": "text_repeat", "inputs": words, "request_id": name}

    async with tritonclient.grpc.aio.InferenceServerClient(triton.grpc_address) as client:
        arrived = [result async for result, error in client.stream_infer(requests()) if error is None]
    for name in ("one", "two"):
        words = [r.as_numpy("text_output")[0] for r in arrived if r.get_response().id == name]
        assert words == [b"a", b"b", b"a"]


async def test_a_cancelled_task_reaches_the_model(triton: ServerProcess, hold: Hold) -> None:
    async with tritonclient.grpc.aio.InferenceServerClient(triton.grpc_address) as client:
        task = asyncio.create_task(client.infer("held", hold.inputs(GRPC)))
        await asyncio.to_thread(hold.wait_started)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(hold.wait_cancelled)
