"""A running server that is asked anything, beside a victim: a client whose answers must stay as they are."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any

import httpx
import psutil

from tests.server_process import ServerProcess

PATIENCE_S = 240.0
"""Long, because `make fuzz` may run beside other work."""
_RETRY_S = 0.1
_MOST_GROWTH_BYTES = 1 << 30
"""What the processes may take on: the KV cache, models that are loaded with their first request, caches."""
FORBIDDEN = (b"Traceback", b"internal server error", b'"internal"', b"0x7f")
"""What no answer contains."""
_PROBLEM = re.compile(r"^(Traceback .*|[-0-9]+ [0-9:,]+ (?:ERROR|CRITICAL) .*)$", re.MULTILINE)
_UNAVAILABLE = {501, 503, 504}
OF_TRITON = re.compile(
    rb'\{"error":"(Unable to (parse|open)|[Ff]ailed to (parse|load|get)|Expected JSON|generate expects|attempt to )'
)
"""Begins the refusals that Triton answers with 500, and we do as it does."""
_OPENAI = {"message", "type", "param", "code"}


class Victim(threading.Thread):
    """Streams the same answer again and again, and records the first that differs."""

    def __init__(self, server: ServerProcess) -> None:
        super().__init__(name="victim", daemon=True)
        self._server = server
        self._is_over = threading.Event()
        self.expected = self._ask()
        self.num_answers = 0
        self.problem = ""

    def run(self) -> None:
        while not self._is_over.is_set() and not self.problem:
            try:
                answer = self._ask()
            except Exception as error:
                self.problem = f"{type(error).__name__}: {error}"
                return
            self.num_answers += 1
            if answer != self.expected:
                self.problem = f"expected {self.expected!r}, got {answer!r}"

    def stop(self) -> None:
        self._is_over.set()
        self.join(PATIENCE_S)

    def _ask(self) -> str:
        body = {"model": self._server.model, "prompt": "Once upon", "max_tokens": 40, "temperature": 0, "stream": True}
        with httpx.Client(base_url=self._server.base_url, timeout=PATIENCE_S) as client:
            while (answer := client.post("/v1/completions", json=body)).status_code == HTTPStatus.TOO_MANY_REQUESTS:
                self._is_over.wait(_RETRY_S)  # the queue is full of what the others ask for
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert lines[-1] == "[DONE]", answer.text
        return "".join(each["text"] for line in lines[:-1] for each in json.loads(line)["choices"])


class Target:
    """The server, and what must hold of it after each request."""

    def __init__(self, server: ServerProcess, victim: Victim) -> None:
        self.server = server
        self._victim = victim
        self.client = httpx.Client(base_url=server.base_url, timeout=PATIENCE_S)
        self.document: dict[str, Any] = self.client.get("/openapi.json").json()
        self._log_bytes = server.log_path.stat().st_size

    def send(self, method: str, path: str, body: bytes | None, headers: dict[str, str]) -> httpx.Response:
        """Send a request and check its answer, the log, and that the server serves."""
        request = self.client.build_request(method, "/", content=body, headers=headers)
        request.url = request.url.copy_with(raw_path=path.encode("ascii"))
        answer = self.client.send(request)
        check_answer(answer.request.url.path, answer.status_code, answer.content)
        self.check()
        return answer

    def check(self) -> None:
        """Check that the process lives, serves, and has logged no error since the last check."""
        assert self.server.process.poll() is None, "the server has ended"
        assert not self._victim.problem, self._victim.problem
        assert self.client.get("/health").status_code == 200
        with self.server.log_path.open("rb") as log:
            log.seek(self._log_bytes)
            text = log.read().decode(errors="replace")
        self._log_bytes = self.server.log_path.stat().st_size
        found = _PROBLEM.search(text)
        assert found is None, text[found.start() : found.start() + 4000]

    def memory_bytes(self) -> int:
        """Return what the server and its engine hold."""
        process = psutil.Process(self.server.pid)
        return sum(each.memory_info().rss for each in (process, *process.children(recursive=True)))


@contextmanager
def attacking(server: ServerProcess) -> Iterator[Target]:
    """A target whose victim streams meanwhile."""
    victim = Victim(server)
    target = Target(server, victim)
    before = target.memory_bytes()
    victim.start()
    try:
        yield target
    finally:
        victim.stop()
        target.client.close()
    assert not victim.problem, victim.problem
    assert victim.num_answers
    assert target.memory_bytes() - before < _MOST_GROWTH_BYTES


def check_answer(path: str, status: int, body: bytes) -> None:
    """Check that an answer is good, or a refusal in the shape of the protocol that owns the path."""
    for each in FORBIDDEN:
        assert each not in body, body[:2000]
    is_of_triton = status == 500 and path.startswith("/v2/") and OF_TRITON.match(body)
    assert 200 <= status < 500 or status in _UNAVAILABLE or is_of_triton, (status, body[:2000])
    if status < 400 or not body:
        return
    found = json.loads(body)
    if path.startswith(("/v2/", "/api/")) and path != "/v2/rerank":
        assert isinstance(found["error"], str) and found["error"], found
    elif path.startswith("/v1/messages"):
        assert found["type"] == "error" and found["error"]["type"] and found["error"]["message"], found
    elif path not in ("/health", "/ping"):
        assert found["error"].keys() == _OPENAI and found["error"]["message"], found
        if status == HTTPStatus.BAD_REQUEST:
            is_whole = any(each in found["error"]["message"] for each in ("the request body", "the form"))
            assert found["error"]["param"] or is_whole, found
