"""Sends requests of every kind to a server until it is stopped, so that each panel has data."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx

API_KEY = "a key for the test"
HEADERS = {"authorization": f"Bearer {API_KEY}"}
PAUSE_S = 0.5
"""Time between rounds in which the server has nothing to do, so that it is not the processor that all wait for."""
DOCUMENT = "# Office\n\nThe report printer is in room 12.\n"
_CONFIG = """
name: "{name}"
backend: "python"
max_batch_size: 8
input {{ name: "x" data_type: TYPE_INT32 dims: [ 1 ] }}
output {{ name: "y" data_type: TYPE_INT32 dims: [ 1 ] }}
dynamic_batching {{ max_queue_delay_microseconds: 2000 }}
response_cache {{ enable: true }}
"""
_DOUBLED = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self._respond(request) for request in requests]

    def _respond(self, request):
        x = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
        if (x < 0).any():
            return pb_utils.InferenceResponse(error=pb_utils.TritonError("x must not be negative"))
        return pb_utils.InferenceResponse([pb_utils.Tensor("y", x * 2)])
"""


def write_repository(folder: Path) -> Path:
    """Write a batched Python model with a response cache, which fails for negative numbers."""
    version = folder / "doubled" / "1"
    version.mkdir(parents=True)
    (version.parent / "config.pbtxt").write_text(_CONFIG.format(name="doubled"))
    (version / "model.py").write_text(_DOUBLED)
    return folder


@contextmanager
def traffic(base_url: str) -> Iterator[None]:
    """Send traffic from a thread while the context lasts. Raises the first unexpected failure of a client."""
    stopping = threading.Event()
    failures: list[BaseException] = []

    def run() -> None:
        try:
            asyncio.run(_all_kinds(base_url, stopping))
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="traffic")
    thread.start()
    try:
        yield
    finally:
        stopping.set()
        thread.join(60.0)
    if failures:
        raise failures[0]


async def _all_kinds(base_url: str, stopping: threading.Event) -> None:
    async with httpx.AsyncClient(base_url=base_url, headers=HEADERS, timeout=120.0) as client:
        await _put_document(client)
        for round_number in count():
            if round_number and await asyncio.to_thread(stopping.wait, PAUSE_S):
                return
            await asyncio.gather(
                *(_chat(client, f"Tell me of the number {round_number} and {each}.") for each in range(3)),
                _disconnect(client),
                _send_bad_request(client),
                _expire(client),
                _question(client),
                *(_infer(client, each) for each in (1, 2, 3, round_number)),
                _fail(client),
            )


async def _chat(client: httpx.AsyncClient, text: str) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=_chat_body(text)) as response:
        assert response.status_code == 200, await response.aread()
        lines = [line async for line in response.aiter_lines() if line]
    assert lines[-1] == "data: [DONE]"


def _chat_body(text: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "rill", "messages": messages, "max_tokens": 24, "stream": True}


async def _disconnect(client: httpx.AsyncClient) -> None:
    body = _chat_body("Tell me a long story.") | {"max_tokens": 400, "ignore_eos": True}
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        await anext(response.aiter_lines())


async def _send_bad_request(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/chat/completions", json=_chat_body("Hello") | {"max_tokens": -1})
    assert answer.status_code == 400


async def _expire(client: httpx.AsyncClient) -> None:
    """Send a request that ends at its deadline, where the machine is slow enough."""
    body = _chat_body("Count.") | {"stream": False, "max_tokens": 400, "ignore_eos": True}
    await client.post("/v1/chat/completions", json=body, headers={"x-sluice-timeout-ms": "20"})


async def _put_document(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "text/markdown"}
    answer = await client.put("/v1/rag/docs/documents/office.md", content=DOCUMENT, headers=headers)
    assert answer.status_code == 201, answer.text


async def _question(client: httpx.AsyncClient) -> None:
    body = {"question": "Where is the report printer?", "stream": False}
    answer = await client.post("/v1/rag/docs/query", json=body)
    assert answer.status_code == 200, answer.text


async def _infer(client: httpx.AsyncClient, number: int) -> None:
    answer = await client.post("/v2/models/doubled/infer", json=_inference(number))
    assert answer.json()["outputs"][0]["data"] == [number * 2], answer.text


async def _fail(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v2/models/doubled/infer", json=_inference(-1))
    assert answer.status_code != 200


def _inference(number: int) -> dict[str, Any]:
    return {"inputs": [{"name": "x", "shape": [1, 1], "datatype": "INT32", "data": [number]}]}
