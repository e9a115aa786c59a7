"""Two gateways with one Redis, of which one is killed or stopped: the other goes on with its streams, of all kinds.
`test_takeover.py` has them in one process, at each point of a stream."""

import asyncio
import json
import random
import signal
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from benchmarks.streaming.cutting import Cuts, CutStream
from tests.gateway.tiny_checkpoint import write_tiny_checkpoint
from tests.pipelines.chat.chat_folder import HERMES_TEMPLATE
from tests.server_process import MODEL, ServerProcess, running_server
from tests.serving.caching.parts import RedisServer
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)
READ_S = 120.0
"""Longest time for all of a stream, on a machine that other tests keep busy."""
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
COMMON: dict[str, Any] = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
LONG = COMMON | {"prompt": "A story:", "max_tokens": 600, "ignore_eos": True}
BRIEF = COMMON | {"prompt": "x", "max_tokens": 3}
ASKED = COMMON | {"messages": [{"role": "user", "content": "Well?"}], "temperature": 1.0, "seed": 7}
NUMBERS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "minItems": 120, "maxItems": 120}
FORMAT = {"type": "json_schema", "json_schema": {"name": "numbers", "schema": NUMBERS}}
COUNT = {"name": "count", "parameters": {"type": "object", "properties": {"n": NUMBERS}, "required": ["n"]}}
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (COMPLETION, LONG | {"temperature": 0}),
    "seeded": (COMPLETION, LONG | {"temperature": 1.0, "seed": 3}),
    "logprobs": (COMPLETION, LONG | {"temperature": 0, "logprobs": 2}),
    "several": (CHAT, ASKED | {"max_tokens": 250, "ignore_eos": True, "n": 3}),
    "grammar": (CHAT, ASKED | {"response_format": FORMAT, "max_tokens": 600, "logprobs": True}),
    "tools": (
        CHAT,
        ASKED
        | {
            "tools": [{"type": "function", "function": COUNT}],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 600,
        },
    ),
    "stop": (COMPLETION, LONG | {"temperature": 1.0, "seed": 5, "stop": ["never in the text"]}),
}

REASONING = "{%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"


def fold(events: Iterable[bytes]) -> dict[Any, Any]:
    """Return what the events of a chat or a completion say together: of each choice its text, its calls, its log
    probabilities and its end; and the usage. Raises AssertionError for an error among them."""
    folded: dict[Any, Any] = {}
    for event in events:
        data = event.rpartition(b"data: ")[2]
        if data == b"[DONE]":
            folded["is_done"] = True
            continue
        payload = json.loads(data)
        assert "error" not in payload, payload
        if payload.get("usage"):
            folded["usage"] = {**payload["usage"], "prompt_tokens_details": "as the cache had them"}
        for choice in payload["choices"]:
            _add(folded.setdefault(choice["index"], {"text": "", "calls": "", "logprobs": [], "roles": 0}), choice)
    return folded


def _add(choice: dict[str, Any], piece: dict[str, Any]) -> None:
    delta = piece.get("delta", {})
    choice["text"] += piece.get("text") or delta.get("content") or ""
    choice["roles"] += "role" in delta
    for call in delta.get("tool_calls", ()):
        choice["calls"] += call["function"].get("name", "") + call["function"]["arguments"]
    logprobs = piece.get("logprobs")
    if logprobs is not None:
        found = [each["token"] for each in logprobs["content"]] if "content" in logprobs else logprobs["tokens"]
        choice["logprobs"] += found
    if piece["finish_reason"] is not None:
        assert "finish" not in choice, "a second end"
        choice["finish"] = piece["finish_reason"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a chat template for tools, and none for reasoning."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("tiny") / "1")
    (folder / "chat_template.jinja").write_text(HERMES_TEMPLATE.replace(REASONING, ""))
    return folder


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with running_redis(tmp_path) as server:
        yield server


@pytest.fixture
def gateways(checkpoint: Path, redis: RedisServer, tmp_path: Path) -> Iterator[list[ServerProcess]]:
    """Two that a test may do with as it likes."""
    with running_pair(checkpoint, redis, tmp_path) as found:
        yield found


@contextmanager
def running_redis(folder: Path) -> Iterator[RedisServer]:
    server = RedisServer(folder)
    asyncio.run(server.start())
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def running_pair(checkpoint: Path, redis: RedisServer, folder: Path) -> Iterator[list[ServerProcess]]:
    store = f"redis://127.0.0.1:{redis.port}/0"
    # In bf16 what else is in a batch changes an answer.
    stores = (f"--stream-store={store}", f"--responses-store={store}")
    options = ("--stream-resume-secs=30", *stores, "--dtype=f32", "--exit-timeout-secs=0")
    with ExitStack() as stack:
        found = [stack.enter_context(running_server(checkpoint, folder / f"{name}.log", *options)) for name in "ab"]
        for each in found:
            each.wait_ready()
        yield found


def address_of(server: ServerProcess) -> tuple[str, int]:
    url = httpx.URL(server.base_url)
    assert url.port is not None
    return url.host, url.port


def stream_of(servers: list[ServerProcess], name: str, cuts: int = 0, seed: int = 1) -> CutStream:
    path, body = REQUESTS[name]
    spots = Cuts(random.Random(seed), cuts, 20_000)
    return CutStream([address_of(each) for each in servers], path, body, spots, token_hex(8))


_UNCUT: dict[str, Any] = {}
"""Answers that nobody has cut, by name: they are the same on every gateway, alone and in company."""


async def check_answers(server: ServerProcess, streams: dict[str, CutStream]) -> None:
    """Compare streams with the same answers without a cut."""
    uncut = {name: stream_of([server], name) for name in streams if name not in _UNCUT}
    await asyncio.gather(*(each.read(READ_S) for each in uncut.values()))
    _UNCUT.update((name, fold(each.events)) for name, each in uncut.items())
    for name, stream in streams.items():
        assert fold(stream.events) == _UNCUT[name], name


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_streams_of_a_gateway_that_ends_go_on_at_the_other(gateways: list[ServerProcess], number: int) -> None:
    first, second = gateways
    streams = {name: stream_of([first, second], name) for name in REQUESTS}
    reading = [asyncio.create_task(each.read(READ_S)) for each in streams.values()]
    await until(lambda: all(len(each.events) > 5 for each in streams.values()))
    first.process.send_signal(number)
    await asyncio.gather(*reading)
    # A gateway that is told to end may have ended a short one by itself. Ids behind a takeover have a dot.
    moved = [each for each in streams.values() if b"." in each.last_id]
    assert moved
    assert second.log.count("goes on here: its gateway is gone") == len(moved)
    await check_answers(second, streams)
    assert len(json.loads(fold(streams["grammar"].events)[0]["text"])) == 120
    assert len(json.loads(fold(streams["tools"].events)[0]["calls"].removeprefix("count"))["n"]) == 120


async def test_after_an_outage_of_redis_no_gateway_is_gone_at_once(
    gateways: list[ServerProcess], redis: RedisServer
) -> None:
    """The first gateway does not run when Redis comes back, whose leases have ended meanwhile."""
    first, second = gateways
    stream = stream_of([first, second], "greedy")
    stream.cuts = Cuts(random.Random(1), most=1, most_bytes=4000)
    reading = asyncio.create_task(stream.read(READ_S))
    await until(lambda: stream.num_connections == 2 and len(stream.events) > 60)
    first.process.send_signal(signal.SIGSTOP)
    redis.signal(signal.SIGSTOP)
    await until(lambda: "the stream store is away" in second.log)
    redis.signal(signal.SIGCONT)
    client = Redis(port=redis.port)
    await client.delete(*await client.keys("sluice:streams:gateway:*"))
    await until(lambda: "the stream store answers again" in second.log)
    await until(lambda: client.exists(f"sluice:streams:{stream.stream_id}:reader"))
    await client.aclose()
    first.process.send_signal(signal.SIGCONT)
    await reading
    assert "goes on here" not in second.log
    await check_answers(first, {"greedy": stream})


async def test_a_response_in_the_background_is_followed_at_whichever_gateway(gateways: list[ServerProcess]) -> None:
    body = {"model": MODEL, "input": "Well?", "max_output_tokens": 1000, "stream": True, "background": True}
    with gateways[0].client() as client, gateways[1].client() as other:
        with client.stream("POST", "/v1/responses", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created"
            response_id = json.loads(next(lines).removeprefix("data: "))["response"]["id"]
            followed = other.get(f"/v1/responses/{response_id}?stream=true&starting_after=1")
            rest = "\n".join(lines)
        assert followed.status_code == 200
        assert rest.rstrip("\n").endswith(followed.text.rstrip("\n"))
        numbers = [
            json.loads(each[6:])["sequence_number"] for each in followed.text.split("\n") if each[:6] == "data: "
        ]
        assert numbers == list(range(2, len(numbers) + 2))
