"""Renders chat templates that clients send, in processes of their own with limits on time and memory."""

import asyncio
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any, TypeVar

import msgspec

from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.pipelines.text.template_forms import TemplateForms
from sluice.pipelines.text.template_worker import CPU_S, MEMORY_BYTES, TemplateJob, TemplateResult

_WORKER = "sluice.pipelines.text.template_worker"
_NUM_THREADS = 8
"""Most templates that are rendered at a time; further ones wait."""
_WALL_S = 30.0
"""Longest time for an answer, the start of the process included; `CPU_S` ends a template much earlier."""
_MAX_ERROR_CHARS = 300
_NUM_PROBED = 64
"""Templates whose forms are kept."""
_ENV = {"PYTHONDONTWRITEBYTECODE": "1"}
"""The worker's environment: it has none of the server's secrets."""

T = TypeVar("T")


class TemplateSandbox:
    """Renders templates in a worker process, which starts with the first one. Usable from any thread."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._worker: _Worker | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="template")
        self._probed: dict[str, TemplateForms] = {}

    async def run(self, work: Callable[[], T]) -> T:
        """Return the result of `work`, which renders templates, on a thread that others do not wait for."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def render(self, job: TemplateJob) -> str:
        """Return the text of a template. Raises INVALID (param "chat_template") for one that fails or takes too much,
        and UNAVAILABLE where no process can be started."""
        result = self._run_job(job)
        if result is None:
            size = f"{CPU_S} s of processor time or {MEMORY_BYTES >> 20} MiB of memory"
            raise invalid("chat_template", f"chat_template takes more than {size}")
        if result.error:
            raise invalid("chat_template", f"chat_template cannot be rendered: {result.error[:_MAX_ERROR_CHARS]}")
        return result.text

    def probe(self, template: str, arguments: dict[str, Any]) -> TemplateForms:
        """Return the forms of turns that a template takes, the usual ones for one that takes too much. Raises
        UNAVAILABLE as `render`."""
        forms = self._probed.get(template)
        if forms is None:
            result = self._run_job(TemplateJob(template, [], None, None, True, False, arguments))
            forms = TemplateForms() if result is None else result.forms
            with self._lock:
                while len(self._probed) >= _NUM_PROBED:
                    del self._probed[next(iter(self._probed))]
                self._probed[template] = forms
        return forms

    def _run_job(self, job: TemplateJob) -> TemplateResult | None:
        """Return the result of a job, None for one that takes too much."""
        try:
            reply = self._exchange(msgspec.msgpack.encode(job))
        except OSError as error:
            message = f"the server cannot render chat templates of requests now: {error}"
            raise SluiceError(ErrorCode.UNAVAILABLE, message) from error
        return msgspec.msgpack.decode(reply, type=TemplateResult) if reply else None

    def _exchange(self, job: bytes) -> bytes:
        """Return the reply to a job; an empty one where its process was ended."""
        with self._connect() as connection:
            connection.settimeout(_WALL_S)
            try:
                connection.sendall(job)
                connection.shutdown(socket.SHUT_WR)
                with connection.makefile("rb") as file:
                    return file.read()
            except (BrokenPipeError, ConnectionResetError, TimeoutError):
                return b""

    def _connect(self) -> socket.socket:
        """Return a connection to a new child of the worker, which is replaced where it has ended."""
        with self._lock:
            if self._worker is None or not self._worker.is_running:
                self._worker = _Worker()
            return self._worker.connect()


class _Worker:
    """The worker process. It ends with this object."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = (
                sys.executable,
                "-c",
                f"import sys; sys.path[:] = {sys.path!r}; from {_WORKER} import main; main()",
            )
            self._process = subprocess.Popen(command, stdin=theirs.fileno(), env=_ENV, start_new_session=True)
        self._finalizer = weakref.finalize(self, _end, self._process, self._socket)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def connect(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"\0"], [theirs.fileno()])
        return ours


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
