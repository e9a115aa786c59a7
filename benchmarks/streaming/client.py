"""This module compiles and runs the load generator, which is written in C so that it never is the bottleneck."""

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import BenchmarkError

SOURCE = Path(__file__).with_name("client.c")
LIMIT_S = 3600.0
Running = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Load:
    """Holds what the load generator saw. `events` are those with text, and `smooth` answers had no pause; times are
    microseconds."""

    elapsed: float
    cpu: float
    answers: int
    tokens: int
    events: int
    bytes: int
    smooth: int
    first_p50: float
    first_p99: float
    first_max: float
    gap_p50: float
    gap_p99: float
    gap_max: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens * 1e6 / self.elapsed


@dataclass(frozen=True, slots=True)
class Client:
    """The compiled load generator, on the given cores."""

    program: Path
    cores: Sequence[int]

    @classmethod
    def build(cls, folder: Path, cores: Sequence[int]) -> "Client":
        """Compile into `folder`. Raises BenchmarkError without a C compiler."""
        if shutil.which("cc") is None:
            raise BenchmarkError("the load generator needs a C compiler: apt-get install gcc libc6-dev")
        folder.mkdir(parents=True, exist_ok=True)
        program = folder.resolve() / "streaming-client"
        subprocess.run(("cc", "-O2", "-o", program, SOURCE), check=True)
        return cls(program, cores)

    def start(
        self, port: int, request: bytes, *, streams: int, requests: int, tokens: int, pause_ms: float = 1e9
    ) -> Running:
        """Begin to send `request` over and over, `streams` at a time. Each answer must have so many `tokens`; gaps of
        more than `pause_ms` are pauses."""
        arguments = (port, streams, requests, tokens, pause_ms * 1e3)
        command = ("taskset", "-c", ",".join(map(str, self.cores)), str(self.program), *map(str, arguments))
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert process.stdin is not None
        process.stdin.write(request)
        process.stdin.close()
        process.stdin = None
        return process

    def run(
        self, port: int, request: bytes, *, streams: int, requests: int, tokens: int, pause_ms: float = 1e9
    ) -> Load:
        """Send `requests` requests, and return what came once all are answered."""
        return finish(self.start(port, request, streams=streams, requests=requests, tokens=tokens, pause_ms=pause_ms))


def finish(process: Running) -> Load:
    """Return what a client saw. Raises BenchmarkError where an answer was wrong."""
    output, errors = process.communicate(timeout=LIMIT_S)
    if process.returncode:
        raise BenchmarkError(f"the load generator ended: {errors.decode(errors='replace').strip()}")
    return Load(**json.loads(output))


def http_request(path: str, body: Mapping[str, Any]) -> bytes:
    """Return a POST of `body` as it goes over the wire."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    return head.encode() + b"\r\n\r\n" + content


def chat_request(model: str, num_tokens: int, **more: Any) -> bytes:
    """Return a streamed chat completion of `num_tokens` tokens that says how many they were."""
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    return http_request("/v1/chat/completions", {"messages": messages, **_streamed(model, num_tokens), **more})


def completion_request(model: str, num_tokens: int, **more: Any) -> bytes:
    """Return a streamed completion of `num_tokens` tokens that says how many they were."""
    return http_request("/v1/completions", {"prompt": "Tell me about", **_streamed(model, num_tokens), **more})


def _streamed(model: str, num_tokens: int) -> dict[str, Any]:
    usage = {"include_usage": True}
    return {"model": model, "max_tokens": num_tokens, "ignore_eos": True, "stream": True, "stream_options": usage}
