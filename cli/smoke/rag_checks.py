"""The check of retrieval-augmented generation, in a collection of its own that it deletes again."""

import secrets

from sluice.cli.smoke.deployment import Deployment, SmokeFailedError, SmokeSkippedError
from sluice.cli.smoke.text_checks import compare
from sluice.cli.sse import DONE

_DOCUMENT = b"# Refunds\n\nMoney comes back within five days.\n"
_QUESTION = "How long does a refund take?"


async def check_rag(deployment: Deployment) -> str:
    """A document that has just been put in is the source of an answer, whole and streamed."""
    response = await deployment.try_to_send("GET", "/v1/rag/collections")
    if response.status_code in (403, 404, 501):
        raise SmokeSkippedError("no collections of documents are served (--rag)")
    collection = f"smoke-{secrets.token_hex(6)}"
    await deployment.post("/v1/rag/collections", {"name": collection})
    try:
        return await _ask(deployment, collection)
    finally:
        await deployment.send("DELETE", f"/v1/rag/collections/{collection}")


async def _ask(deployment: Deployment, collection: str) -> str:
    path = f"/v1/rag/{collection}"
    headers = {"content-type": "text/markdown"}
    await deployment.send("PUT", f"{path}/documents/refunds.md", content=_DOCUMENT, headers=headers)
    hits = (await deployment.post(f"{path}/search", {"question": _QUESTION}))["data"]
    if not hits or hits[0]["document"] != "refunds.md":
        raise SmokeFailedError(f"POST {path}/search: found {[hit['document'] for hit in hits]}, expected refunds.md")
    body = {"question": _QUESTION, "temperature": 0, "max_tokens": 24}

    async def whole() -> str:
        answer = await deployment.post(f"{path}/query", body)
        if [source["document"] for source in answer["sources"]] != ["refunds.md"]:
            raise SmokeFailedError(f"POST {path}/query: sources {answer['sources']}, expected refunds.md alone")
        return str(answer["answer"])

    async def streamed() -> str:
        events = await deployment.events(f"{path}/query", {**body, "stream": True})
        if not events or events[-1].name != DONE:
            raise SmokeFailedError(f"POST {path}/query: the stream of {len(events)} events did not end with [DONE]")
        return "".join(event.payload["text"] for event in events if event.name == "token")

    return f"put in, found and cited; {await compare(f'{path}/query', whole, streamed)}"
