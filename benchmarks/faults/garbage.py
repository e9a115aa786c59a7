"""Requests that are none, beside a stream of somebody else: what is answered, and does the other notice?"""

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.client import PATH, WHOLE, HealthWatch, Stream, completion, opened, served_again, watching
from benchmarks.faults.findings import Finding, tally
from benchmarks.faults.server import FaultServer, Limits

LIMITS = Limits()
ANSWER_S = 15.0
"""Seconds that the sender waits for an answer."""
NUM_SLOW, SLOW_S = 16, 10.0
OTHER_TOKENS = 900
Body = Callable[[FaultServer], bytes]


@dataclass(frozen=True, slots=True)
class Case:
    """A kind of garbage. `is_half` sends a body that ends early and waits."""

    name: str
    body: Body
    is_half: bool = False


def _fields(**fields: Any) -> Body:
    return lambda server: json.dumps({"model": server.model, "prompt": "x", "max_tokens": 4, **fields}).encode()


def _raw(text: str) -> Body:
    return lambda server: text.replace("MODEL", server.model).encode()


CASES = (
    Case("no JSON", _raw("{'prompt': x")),
    Case("no object", _raw("[1, 2, 3]")),
    Case("invalid UTF-8", lambda server: b'{"model": "\xff\xfe"}'),
    Case(
        "100,000 arrays in arrays",
        _raw('{"model": "MODEL", "prompt": "x", "u": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    ),
    Case("prompt of a wrong type", _fields(prompt={"a": 1})),
    Case("max_tokens as text", _fields(max_tokens="many")),
    Case("max_tokens 10^30", _fields(max_tokens=10**30)),
    Case("max_tokens -1", _fields(max_tokens=-1)),
    Case("temperature 1e999", _raw('{"model": "MODEL", "prompt": "x", "max_tokens": 4, "temperature": 1e999}')),
    Case(
        "a number of 100,000 digits",
        _raw(f'{{"model": "MODEL", "prompt": "x", "max_tokens": 4, "seed": {"9" * 100_000}}}'),
    ),
    Case("n = 10,000", _fields(n=10_000)),
    Case("10,000 stop strings", _fields(stop=[f"stop {number}" for number in range(10_000)])),
    Case("prompt longer than the context", _fields(prompt="word " * 200_000)),
    Case("unknown model", lambda server: json.dumps({"model": "nobody", "prompt": "x", "max_tokens": 4}).encode()),
    Case("half a body", _fields(), is_half=True),
)


async def measure(server: FaultServer) -> list[Finding]:
    """Send every case beside a stream that goes on and on."""
    other = _Other(server)
    async with watching(HealthWatch(server, timeout_s=10.0)) as health:
        running = asyncio.create_task(other.run())
        await other.is_under_way.wait()
        answers = [(case.name, await _send(server, case)) for case in CASES]
        await _read_slowly(server)
        other.is_ending = True
        await running
        is_served = await served_again(server, 30.0)
    return [*(Finding(name, answer) for name, answer in answers), *_findings(server, other, health, is_served)]


def _findings(server: FaultServer, other: "_Other", health: HealthWatch, is_served: bool) -> Iterator[Finding]:
    yield Finding("streams of others meanwhile", tally(other.ends))
    yield Finding("longest pause of theirs", other.longest_pause_s, "s")
    yield Finding("longest answer of /health", health.longest_s, "s")
    yield Finding("/health ever but 200", ", ".join(sorted({state for _, state in health.changes} - {"200"})) or "no")
    yield Finding("serves afterwards", "yes" if is_served else "no")
    yield Finding("tracebacks in its log", float(server.log.read_bytes().count(b"Traceback (most recent")))


class _Other:
    """Somebody else, who reads one stream after the other."""

    def __init__(self, server: FaultServer) -> None:
        self._server = server
        self.is_under_way = asyncio.Event()
        self.is_ending = False
        self.ends: list[str] = []
        self.longest_pause_s = 0.0

    async def run(self) -> None:
        """Read streams until told to end; the last is read to its end."""
        async with opened(self._server) as client:
            while not self.is_ending:
                stream = Stream(completion(self._server, 77, OTHER_TOKENS))
                reading = asyncio.create_task(stream.read(client))
                await stream.is_under_way.wait()
                self.is_under_way.set()
                await reading
                self.ends.append(stream.end or "")
                self.longest_pause_s = max(self.longest_pause_s, stream.longest_pause_s())
                if stream.end != WHOLE:
                    await asyncio.sleep(1.0)


async def _send(server: FaultServer, case: Case) -> str:
    """Send the case over a connection of its own. Returns the answer's status and form, or what came instead."""
    body = case.body(server)
    began_s = time.perf_counter()
    try:
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            try:
                writer.write(_request(body, length=len(body) + 100 * case.is_half))
                with suppress(ConnectionError):  # an answer may come before the whole body is read
                    await writer.drain()
                answer = await reader.read(-1)
            finally:
                writer.transport.abort()
    except TimeoutError:
        return f"no answer in {ANSWER_S:.0f} s"
    except OSError as error:
        return type(error).__name__
    return describe_answer(answer) + _slowness(time.perf_counter() - began_s)


def _slowness(took_s: float) -> str:
    return f", after {took_s:.1f} s" if took_s > 1.0 else ""


def _request(body: bytes, length: int) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {length}\r\n\r\n".encode() + body


def describe_answer(answer: bytes) -> str:
    """Return the status of an HTTP answer, and whether its body is an error as OpenAI writes it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    words = head.split(b"\r\n", 1)[0].split(b" ")
    if len(words) < 2:
        return "closed without an answer"
    status = words[1].decode(errors="replace")
    return status if status == "200" else f"{status} {_form(body)}"


def _form(body: bytes) -> str:
    begin, end = body.find(b"{"), body.rfind(b"}")  # chunked encoding frames it
    try:
        found = json.loads(body[begin : end + 1])
    except ValueError:
        return "text" if body.strip() else "empty"
    if isinstance(found.get("error"), dict) and "message" in found["error"]:
        return "OpenAI's error"
    return "other JSON"


async def _read_slowly(server: FaultServer) -> None:
    """Hold streams of which nothing is read for a time, then drop them."""

    async def hold(number: int) -> None:
        body = json.dumps(completion(server, number, OTHER_TOKENS)).encode()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(SLOW_S + 5):
                _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=4096)
                writer.write(_request(body, len(body)))
                await asyncio.sleep(SLOW_S)
                writer.transport.abort()

    await asyncio.gather(*(hold(number) for number in range(NUM_SLOW)))
