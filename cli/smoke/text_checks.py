"""Checks of the protocols that generate text, RAG among them: the streamed answer equals the whole one."""

import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from sluice.cli.server import DONE, JsonObject
from sluice.cli.smoke.deployment import Deployment, SmokeFailedError, SmokeSkippedError
from sluice.cli.terminal import shorten_line

PROMPT = "Hello"
NUM_TOKENS = 12
_GREEDY: JsonObject = {"temperature": 0, "max_tokens": NUM_TOKENS}
_MESSAGES = [{"role": "user", "content": PROMPT}]
_SHOWN_CHARS = 40

Answer = Callable[[], Awaitable[str]]


async def check_chat(deployment: Deployment) -> str:
    """OpenAI's chat completions."""
    path = "/v1/chat/completions"
    body = {"model": deployment.required_language_model(), "messages": _MESSAGES, **_GREEDY}

    async def whole() -> str:
        answer = await deployment.post(path, body)
        _require_tokens(path, answer["usage"]["completion_tokens"])
        return _text(answer["choices"][0]["message"]["content"])

    async def streamed() -> str:
        chunks = await deployment.events_until_done(path, {**body, "stream": True})
        return "".join(_text(choice["delta"].get("content")) for chunk in chunks for choice in chunk["choices"])

    return await compare(path, whole, streamed)


async def check_completions(deployment: Deployment) -> str:
    """OpenAI's completions."""
    path = "/v1/completions"
    body = {"model": deployment.required_language_model(), "prompt": PROMPT, **_GREEDY}

    async def whole() -> str:
        answer = await deployment.post(path, body)
        _require_tokens(path, answer["usage"]["completion_tokens"])
        return _text(answer["choices"][0]["text"])

    async def streamed() -> str:
        chunks = await deployment.events_until_done(path, {**body, "stream": True})
        return "".join(_text(choice["text"]) for chunk in chunks for choice in chunk["choices"])

    return await compare(path, whole, streamed)


async def check_responses(deployment: Deployment) -> str:
    """OpenAI's responses, which are not stored."""
    path = "/v1/responses"
    body: JsonObject = {"model": deployment.required_language_model(), "input": PROMPT, "store": False}
    body |= {"temperature": 0, "max_output_tokens": 16}

    async def whole() -> str:
        answer = await deployment.post(path, body)
        return _text_of_response(answer)

    async def streamed() -> str:
        events = await deployment.events(path, {**body, "stream": True})
        last = events[-1].payload if events else {}
        if last.get("type") not in ("response.completed", "response.incomplete"):
            raise SmokeFailedError(f"{path}: the last event was {last.get('type')!r}, expected 'response.completed'")
        pieces = "".join(e.payload["delta"] for e in events if e.name == "response.output_text.delta")
        if pieces != (text := _text_of_response(last["response"])):
            raise SmokeFailedError(f"{path}: the pieces {pieces!r} are not the text of the last event, {text!r}")
        return pieces

    return await compare(path, whole, streamed)


async def check_messages(deployment: Deployment) -> str:
    """Anthropic's messages."""
    path = "/v1/messages"
    body = {"model": deployment.required_language_model(), "messages": _MESSAGES, **_GREEDY}

    async def whole() -> str:
        answer = await deployment.post(path, body)
        return "".join(_text(part.get("text")) for part in answer["content"])

    async def streamed() -> str:
        events = await deployment.events(path, {**body, "stream": True})
        if not events or events[-1].name != "message_stop":
            raise SmokeFailedError(f"{path}: the stream of {len(events)} events did not end with message_stop")
        return "".join(_text(e.payload["delta"].get("text")) for e in events if e.name == "content_block_delta")

    return await compare(path, whole, streamed)


async def check_ollama(deployment: Deployment) -> str:
    """Ollama's chat, whose streams are lines of JSON."""
    path = "/api/chat"
    body: JsonObject = {"model": deployment.required_language_model(), "messages": _MESSAGES}
    body["options"] = {"temperature": 0, "num_predict": NUM_TOKENS}

    async def whole() -> str:
        answer = await deployment.post(path, {**body, "stream": False})
        return _text(answer["message"]["content"])

    async def streamed() -> str:
        lines = [line async for line in deployment.lines(path, body)]
        if not lines or not lines[-1].get("done"):
            raise SmokeFailedError(f"{path}: the last of {len(lines)} lines does not say that it is done")
        return "".join(_text(line["message"]["content"]) for line in lines)

    return await compare(path, whole, streamed)


async def check_generate(deployment: Deployment) -> str:
    """Triton's generate and generate_stream."""
    model = deployment.required_language_model()
    path = f"/v2/models/{model}/generate"
    body = {"text_input": PROMPT, **_GREEDY}

    async def whole() -> str:
        return _text((await deployment.post(path, body))["text_output"])

    async def streamed() -> str:
        events = await deployment.events(f"{path}_stream", {**body, "stream": True})
        return "".join(_text(event.payload["text_output"]) for event in events)

    return await compare(path, whole, streamed)


async def compare(name: str, whole: Answer, streamed: Answer) -> str:
    """Require that both answers have one text; return it for the report.

    Batches of another size may round another way and change a greedy answer once in thousands of times. So a
    difference counts when it comes twice.
    """
    for _ in range(2):
        expected, got = await whole(), await streamed()
        if expected == got:
            return f"whole and streamed {shorten_line(expected, _SHOWN_CHARS)!r}"
    raise SmokeFailedError(f"{name}: the streamed answer is {got!r}, the whole one {expected!r}")


def _require_tokens(path: str, num_tokens: int) -> None:
    if not 0 < num_tokens <= NUM_TOKENS:
        raise SmokeFailedError(f"{path}: usage counts {num_tokens} completion tokens, expected 1 to {NUM_TOKENS}")


def _text(value: Any) -> str:
    return value or ""


def _text_of_response(response: JsonObject) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


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
        return await _ask_collection(deployment, collection)
    finally:
        await deployment.send("DELETE", f"/v1/rag/collections/{collection}")


async def _ask_collection(deployment: Deployment, collection: str) -> str:
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
