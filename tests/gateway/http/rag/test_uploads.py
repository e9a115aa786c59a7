"""Bodies of requests as documents."""

import asyncio

import orjson
from fastapi import Request

from gateway.http.rag.uploads import read_uploads
from gateway.options.http import HttpOptions

NUM_DOCUMENTS = 10_000
BODY = orjson.dumps({"documents": [{"id": str(number), "text": "x"} for number in range(NUM_DOCUMENTS)]})


async def _receive() -> dict[str, object]:
    return {"type": "http.request", "body": BODY, "more_body": False}


async def test_many_documents_do_not_hold_the_event_loop() -> None:
    num_turns = 0

    async def take_turns() -> None:
        nonlocal num_turns
        while True:
            await asyncio.sleep(0.001)
            num_turns += 1

    others = asyncio.create_task(take_turns())
    headers = [(b"content-type", b"application/json")]
    request = Request({"type": "http", "method": "POST", "headers": headers, "query_string": b""}, _receive)
    uploads, _ = await read_uploads(request, HttpOptions())
    others.cancel()
    assert len(list(uploads)) == NUM_DOCUMENTS
    assert num_turns > 3
