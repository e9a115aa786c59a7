"""Measures what one client's request does to the others: hostile requests beside a stream and a poller of `/health`.

Each row of `HOSTILE` is sent by a process of its own while this one measures the longest answer of `/health`, the
longest gap of the stream, and the server's memory.
"""

import asyncio
import json
import multiprocessing
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import httpx
import psutil
from tritonclient.grpc import service_pb2

from benchmarks.figures import BenchmarkError, Figure, ReportProgress, Target
from benchmarks.server import Server, running_server
from sluice.gateway.checkpoint import find_checkpoint, model_name

POLL_S = 0.005
SETTLE_S = 1.5
"""Pause after a request, in which the server gives its memory back."""
ANSWER_TIMEOUT_S = 120.0
STALL_TARGET = Target(50.0)
MEMORY_TARGET = Target(4.0)
LEAST_BODY_MB = 8.0
"""Memory is compared with bodies of at least this size: under it the noise of the server is larger."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
DOCUMENTS = "/v1/rag/isolation/documents"
RPC = "/inference.GRPCInferenceService/ModelInfer"
GENERATE, INFER = "/v2/models/{model}/generate", "/v2/models/{model}/infer"


@dataclass(frozen=True, slots=True)
class HostileRequest:
    """A POST, or for the path RPC a call, that costs a server much. `{model}` in the path stands for the model's name,
    which `body` is given too."""

    name: str
    path: str
    body: Callable[[str], bytes]
    copies: int = 1
    """Connections that send it at once."""
    patience_s: float = ANSWER_TIMEOUT_S
    """Seconds that its client waits for the answer."""


def _json(**fields: Any) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"model": model, "max_tokens": 4, **fields}).encode()


def _with(field: bytes) -> Callable[[str], bytes]:
    """Return a maker of a body with a field that is too large to make of Python's objects."""
    return lambda model: b'{"model":"%s","prompt":"x","max_tokens":4,%s}' % (model.encode(), field)


def _chat(*messages: Any, **more: Any) -> Callable[[str], bytes]:
    return _json(messages=list(messages), **more)


def _text_input(text: str) -> Callable[[str], bytes]:
    return lambda model: json.dumps({"text_input": text, "max_tokens": 4}).encode()


def _schema(num_properties: int) -> dict[str, Any]:
    properties = {f"field_{number}": {"type": "string"} for number in range(num_properties)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _tensor(datatype: bytes, values: bytes, num_values: int) -> Callable[[str], bytes]:
    """Return a maker of an infer request, whose input is one that an LLM has."""
    name = b"text_input" if datatype == b"BYTES" else b"max_tokens"
    tensor = b'{"name":"%s","datatype":"%s","shape":[%d],"data":[%s]}' % (name, datatype, num_values, values)
    return lambda model: b'{"inputs":[%s]}' % tensor


def _documents(num_documents: int, text: str) -> Callable[[str], bytes]:
    documents = [{"id": str(number), "text": text} for number in range(num_documents)]
    return lambda model: json.dumps({"documents": documents}).encode()


def _rpc(raw: bytes = b"", **contents: Any) -> Callable[[str], bytes]:
    """Return a maker of a ModelInferRequest with one input, whose values are raw or typed `contents`."""
    name, datatype = ("max_tokens", "INT32") if "int_contents" in contents else ("text_input", "BYTES")

    def make(model: str) -> bytes:
        request = service_pb2.ModelInferRequest(model_name=model)
        num_elements = max((len(values) for values in contents.values()), default=1)
        request.inputs.add(name=name, datatype=datatype, shape=[num_elements], contents=contents)
        if raw:
            request.inputs[0].ClearField("contents")
            request.raw_input_contents.append(raw)
        return bytes(request.SerializeToString())

    return make


_MESSAGE = {"role": "user", "content": "hi"}
_PART = {"type": "text", "text": "x"}
_CHOICES = [f"choice {number}" for number in range(8000)]
_DEEP = b"[" * 500_000 + b"]" * 500_000

HOSTILE = (
    HostileRequest("no hostile request", COMPLETIONS, _json(prompt="x")),
    HostileRequest("prompt of 1 MB", COMPLETIONS, _json(prompt="a b " * (1 << 18))),
    HostileRequest("prompt of 8 MB", COMPLETIONS, _json(prompt="a b " * (1 << 21))),
    HostileRequest("prompt of 60 MB", COMPLETIONS, _json(prompt="a b " * (15 << 20))),
    HostileRequest("prompt of 60 MB, escaped", COMPLETIONS, _json(prompt="\n" * (30 << 20))),
    HostileRequest("prompt of 60 MB of spaces", COMPLETIONS, _json(prompt=" " * (60 << 20))),
    HostileRequest("prompt of 60 MB, one word", COMPLETIONS, _json(prompt="a" * (60 << 20))),
    HostileRequest("prompt of 8 MB, 8 clients", COMPLETIONS, _json(prompt="a b " * (1 << 21)), copies=8),
    HostileRequest("512 prompts of 100 kB", COMPLETIONS, _json(prompt=["a b " * 25_000] * 512)),
    HostileRequest("message of 8 MB", CHAT, _chat({"role": "user", "content": "a b " * (1 << 21)})),
    HostileRequest("message of control tokens", CHAT, _chat({"role": "user", "content": "<|end|>" * 140_000})),
    HostileRequest("100,000 messages", CHAT, _chat(*[_MESSAGE] * 100_000)),
    HostileRequest("2,000 messages", CHAT, _chat(*[_MESSAGE] * 2000)),
    HostileRequest("100,000 parts", CHAT, _chat({"role": "user", "content": [_PART] * 100_000})),
    HostileRequest("2,000 parts", CHAT, _chat({"role": "user", "content": [_PART] * 2000})),
    HostileRequest("300,000 unknown fields", CHAT, _chat(_MESSAGE, **{f"u{n}": 1 for n in range(300_000)})),
    HostileRequest("1,000 unknown fields", CHAT, _chat(_MESSAGE, **{f"u{n}": 1 for n in range(1000)})),
    HostileRequest("30,000,000 numbers", COMPLETIONS, _with(b'"u":[' + b"1," * 30_000_000 + b"1]")),
    HostileRequest("20,000,000 objects", COMPLETIONS, _with(b'"u":[' + b"{}," * 20_000_000 + b"1]")),
    HostileRequest("30,000 objects", COMPLETIONS, _with(b'"u":[' + b"{}," * 30_000 + b"1]")),
    HostileRequest("nested 500,000 deep", COMPLETIONS, _with(b'"u":' + _DEEP)),
    HostileRequest("1,000,000 token ids", COMPLETIONS, _json(prompt=[300] * 1_000_000)),
    HostileRequest("512 prompts of 2,000 ids", COMPLETIONS, _json(prompt=[[300] * 2000] * 512)),
    HostileRequest("512 prompts of 8 ids", COMPLETIONS, _json(prompt=[[300] * 8] * 512)),
    HostileRequest("128 choices", COMPLETIONS, _json(prompt="a b " * 200, n=128)),
    HostileRequest("1,000,000 stop strings", COMPLETIONS, _json(prompt="x", stop=["ab"] * 1_000_000)),
    HostileRequest("64 long stop strings", COMPLETIONS, _json(prompt="x", stop=["\n" * 1024] * 64, max_tokens=200)),
    HostileRequest("1,000,000 stop tokens", COMPLETIONS, _json(prompt="x", stop_token_ids=[5] * 1_000_000)),
    HostileRequest("256 long bad words", COMPLETIONS, _json(prompt="x", bad_words=["a b " * 256] * 256)),
    HostileRequest("300,000 biases", COMPLETIONS, _json(prompt="x", logit_bias={str(n): 1 for n in range(300_000)})),
    HostileRequest("4,000 biases", COMPLETIONS, _json(prompt="x", logit_bias={str(n): 1 for n in range(4000)})),
    HostileRequest("schema of 3,000 properties", COMPLETIONS, _json(prompt="x", guided_json=_schema(3000))),
    HostileRequest("schema of 8,000 properties", COMPLETIONS, _json(prompt="x", guided_json=_schema(8000))),
    HostileRequest("regex of 8,000 letters", COMPLETIONS, _json(prompt="x", guided_regex="(a?b|c*d)+" * 800)),
    HostileRequest("regex that repeats", COMPLETIONS, _json(prompt="x", guided_regex="((a{1,50}){1,50}){1,50}")),
    HostileRequest("8,000 choices to match", COMPLETIONS, _json(prompt="x", guided_choice=_CHOICES)),
    HostileRequest("model of 8 MB", COMPLETIONS, lambda model: b'{"model":"%s","prompt":"x"}' % (b"m" * (8 << 20))),
    HostileRequest("generate, text of 8 MB", GENERATE, _text_input("a b " * (1 << 21))),
    HostileRequest("generate, text of 60 MB", GENERATE, _text_input("a b " * (15 << 20))),
    HostileRequest("generate, 30,000 parameters", GENERATE, _json(**{f"p{n}": 1 for n in range(30_000)})),
    HostileRequest("infer, 30,000,000 numbers", INFER, _tensor(b"INT32", b"1," * 29_999_999 + b"1", 30_000_000)),
    HostileRequest("infer, 12,000,000 arrays", INFER, _tensor(b"INT32", b"[1]," * 11_999_999 + b"[1]", 12_000_000)),
    HostileRequest("infer, 20,000,000 strings", INFER, _tensor(b"BYTES", b'"",' * 19_999_999 + b'""', 20_000_000)),
    HostileRequest("infer, 200,000 strings", INFER, _tensor(b"BYTES", b'"ab",' * 199_999 + b'""', 200_000)),
    HostileRequest("infer, 20,000,000 objects", INFER, lambda model: b'{"inputs":[' + b"{}," * 20_000_000 + b"1]}"),
    HostileRequest("infer, 5,000 inputs", INFER, lambda model: b'{"inputs":[%s{}]}' % (b'{"name":"a"},' * 5000)),
    HostileRequest("settings of 60 MB", "/v2/logging", _with(b'"u":[' + b"{}," * 20_000_000 + b"1]")),
    HostileRequest("grpc, text of 8 MB", RPC, _rpc(bytes_contents=[b"a b " * (1 << 21)])),
    HostileRequest("grpc, raw text of 60 MB", RPC, _rpc(struct.pack("<I", 60 << 20) + b"a" * (60 << 20))),
    HostileRequest("grpc, 1,000,000 raw strings", RPC, _rpc((struct.pack("<I", 1) + b"a") * 1_000_000)),
    HostileRequest("grpc, 10,000,000 numbers", RPC, _rpc(int_contents=[1] * 10_000_000)),
    HostileRequest("grpc, 1,000,000 strings", RPC, _rpc(bytes_contents=[b"ab"] * 1_000_000)),
    HostileRequest("rag, document of 8 MB", DOCUMENTS, _documents(1, "some words " * 750_000), patience_s=20),
    HostileRequest("rag, 10,000 documents", DOCUMENTS, _documents(10_000, "some words")),
)


@dataclass(frozen=True, slots=True)
class Effect:
    """The effect of a request on the others. Memory is that of all processes, in MB."""

    answer: str
    body_mb: float
    health_ms: float
    gap_ms: float
    peak_mb: float
    left_mb: float


def measure(num_repeats: int, folder: Path, bundled: Path | None, only: str, report: ReportProgress) -> list[Figure]:
    """Send every row whose name has `only` in it, to the bundled models or to the checkpoint `bundled`."""
    model = model_name(bundled or find_checkpoint(None))
    effects: dict[str, list[Effect]] = {}
    report(f"{'request':28} {'body':>6} {'/health':>8} {'stream':>8} {'peak':>7} {'left':>7}  answer")
    with running_server(bundled, folder / "isolation.log") as server, _sender(server, model) as send:
        for row in HOSTILE:
            if only in row.name:
                measured = [asyncio.run(_measure_row(server, model, row, send)) for _ in range(num_repeats)]
                effects[row.name] = measured
                report(_line(row.name, measured))
    if not effects:
        raise BenchmarkError(f"no request of this benchmark has {only!r} in its name")
    return [figure for name, effect in effects.items() for figure in _figures(name, effect)]


def _line(name: str, effects: list[Effect]) -> str:
    figures = {figure.name: figure.median for figure in _figures(name, effects)}
    health_ms, gap_ms, _, left_mb = figures.values()
    peak_mb = statistics.median(effect.peak_mb for effect in effects)
    times, memory = f"{health_ms:6.0f}ms {gap_ms:6.0f}ms", f"{peak_mb:5.0f}MB {left_mb:5.0f}MB"
    return f"{name:28} {effects[0].body_mb:4.0f}MB {times} {memory}  {effects[0].answer}"


def _figures(name: str, effects: list[Effect]) -> Iterator[Figure]:
    yield Figure("longest /health", name, "ms", tuple(effect.health_ms for effect in effects), STALL_TARGET)
    yield Figure("longest gap of a stream", name, "ms", tuple(effect.gap_ms for effect in effects), STALL_TARGET)
    over_body = tuple(effect.peak_mb / max(effect.body_mb, LEAST_BODY_MB) for effect in effects)
    yield Figure("memory at the peak", name, "of the body", over_body, MEMORY_TARGET)
    yield Figure("memory left", name, "MB", tuple(effect.left_mb for effect in effects))


@dataclass(slots=True)
class _Watch:
    """The longest waits and the most memory while a request runs."""

    processes: list[psutil.Process]
    health_s: float = 0.0
    gap_s: float = 0.0
    peak_mb: float = 0.0
    streamed: asyncio.Event = field(default_factory=asyncio.Event)

    async def poll_health(self, client: httpx.AsyncClient) -> None:
        while True:
            sent_s = time.perf_counter()
            response = await client.get("/health")
            response.raise_for_status()
            self.health_s = max(self.health_s, time.perf_counter() - sent_s)
            await asyncio.sleep(POLL_S)

    async def read_stream(self, client: httpx.AsyncClient, model: str) -> None:
        body = {"model": model, "prompt": [300] * 8, "max_tokens": 800, "ignore_eos": True, "stream": True}
        while True:
            async with client.stream("POST", COMPLETIONS, json=body) as response:
                last_s = None
                async for _ in response.aiter_raw():
                    now_s = time.perf_counter()
                    self.gap_s = max(self.gap_s, now_s - (last_s or now_s))
                    last_s = now_s
                    self.streamed.set()

    async def watch_memory(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, _memory_mb(self.processes))
            await asyncio.sleep(POLL_S)


async def _measure_row(server: Server, model: str, row: HostileRequest, send: "Sender") -> Effect:
    watch = _Watch(server.processes())
    async with httpx.AsyncClient(base_url=server.url, timeout=ANSWER_TIMEOUT_S) as client:
        tasks = [asyncio.create_task(watch.read_stream(client, model))]
        await watch.streamed.wait()
        tasks += [asyncio.create_task(watch.poll_health(client)), asyncio.create_task(watch.watch_memory())]
        await asyncio.to_thread(send.prepare, row.name)
        await asyncio.sleep(0.1)
        watch.health_s = watch.gap_s = 0.0
        before_mb = watch.peak_mb = _memory_mb(watch.processes)
        answer, body_mb = await asyncio.to_thread(send.send)
        peak_mb = watch.peak_mb
        await asyncio.sleep(SETTLE_S)
        left_mb = _memory_mb(watch.processes) - before_mb
        for task in tasks:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.wait(tasks)
    return Effect(answer, body_mb, watch.health_s * 1e3, watch.gap_s * 1e3, peak_mb - before_mb, left_mb)


def _memory_mb(processes: list[psutil.Process]) -> float:
    """Return the resident memory of the processes. Shared pages count in each, before and after alike."""
    return sum(process.memory_info().rss for process in processes) / 1e6


class Sender:
    """Sends rows from a process of its own, which takes no time from the measuring one."""

    def __init__(self, orders: Any) -> None:
        self._orders = orders

    def prepare(self, name: str) -> None:
        """Make the body of the row."""
        self._orders.send(name)
        self._orders.recv()

    def send(self) -> tuple[str, float]:
        """Send the prepared row. Returns its answer, and the size of its body in MB."""
        self._orders.send(None)
        answer: tuple[str, float] = self._orders.recv()
        return answer


@contextmanager
def _sender(server: Server, model: str) -> Iterator[Sender]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (theirs, server.url, server.grpc_address, model)
    process = multiprocessing.get_context("spawn").Process(target=_send_rows, args=arguments, daemon=True)
    process.start()
    try:
        yield Sender(ours)
    finally:
        process.kill()
        process.join()


def _send_rows(orders: Any, url: str, grpc_address: str, model: str) -> None:
    """Run the sending process: a name prepares the row, None sends it."""
    rows = {row.name: row for row in HOSTILE}
    while True:
        row = rows[orders.recv()]
        body = row.body(model)
        orders.send(None)
        orders.recv()
        is_rpc = row.path == RPC
        answer = _call(grpc_address, body) if is_rpc else _send_copies(url, row, row.path.format(model=model), body)
        orders.send((answer, len(body) * row.copies / 1e6))


def _send_copies(url: str, row: HostileRequest, path: str, body: bytes) -> str:
    if row.copies == 1:
        return _post(url, path, body, row.patience_s)
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(row.copies) as threads:
        return " | ".join(sorted(set(threads.map(lambda _: _post(url, path, body, row.patience_s), range(row.copies)))))


def _call(address: str, message: bytes) -> str:
    """Return the status of a ModelInfer call, and the beginning of what it says."""
    with grpc.insecure_channel(address, [("grpc.max_send_message_length", -1)]) as channel:
        try:
            channel.unary_unary(RPC)(message, timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name} {error.details()[:80]}"
    return "OK"


def _post(url: str, path: str, body: bytes, patience_s: float) -> str:
    """Return the status and the beginning of the answer."""
    connection = HTTPConnection(urlsplit(url).netloc, timeout=patience_s)
    try:
        connection.request("POST", path, body, {"content-type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except OSError as error:
        return type(error).__name__
    finally:
        connection.close()
    return f"{response.status} {_message(text)[:80]}"


def _message(text: str) -> str:
    try:
        error = json.loads(text)["error"]
    except (ValueError, KeyError):
        return ""
    return error if isinstance(error, str) else str(error["message"])
