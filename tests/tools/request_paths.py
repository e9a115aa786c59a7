"""The files that a warm request runs through: `python -m tests.tools.request_paths`.

A server with the bundled models is started under a profiler (`tracing/sitecustomize.py`). Each request is made once to
warm up and then several times; a file is on its path if every one of these ran some function of it, in the gateway's
process or in the engine's.
"""

import os
import queue
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import tritonclient.grpc as triton

from tests.paths import MODELS, ROOT
from tests.server_process import running_command
from tests.waiting import PATIENCE_S

TRACING = Path(__file__).parent / "tracing"
TIMES = 5
BESIDE = {"gateway/lifecycle.py", "gateway/tenancy/access/ring.py", "gateway/tenancy/access/store.py"}
"""Files that a timer runs, and no request of a server without keys: on a slow machine it may come in every trace."""


@dataclass
class TracedServer:
    """A server whose processes note which files run."""

    pid: int
    base_url: str
    grpc_address: str
    folder: Path

    def files_of(self, request: Callable[["TracedServer"], None]) -> list[str]:
        """Return the files that every one of several warm requests runs through, sorted."""
        request(self)
        return sorted(set.intersection(*(self._trace(request) for _ in range(TIMES))) - BESIDE)

    def _trace(self, request: Callable[["TracedServer"], None]) -> set[str]:
        pids = [self.pid, *(child.pid for child in psutil.Process(self.pid).children())]
        self._signal(pids, signal.SIGUSR1)
        # A signal has no answer: its handler runs within a turn of the process' loop.
        time.sleep(0.2)
        request(self)
        self._signal(pids, signal.SIGUSR2)
        deadline = time.monotonic() + PATIENCE_S
        targets = [self.folder / str(pid) for pid in pids]
        while not all(target.exists() for target in targets):
            assert time.monotonic() < deadline, "a traced process did not write its files"
            time.sleep(0.01)
        files = {line for target in targets for line in target.read_text().split()}
        for target in targets:
            target.unlink()
        return files

    @staticmethod
    def _signal(pids: list[int], number: signal.Signals) -> None:
        for pid in pids:
            os.kill(pid, number)


@contextmanager
def traced_server(folder: Path) -> Iterator[TracedServer]:
    """Serve the bundled models under the profiler."""
    traces = folder / "traces"
    traces.mkdir()
    environment = {
        **os.environ,  # noqa: TID251 - a server inherits its starter's variables
        "PYTHONPATH": str(TRACING),
        "SLUICE_TRACE_ROOT": str(ROOT),
        "SLUICE_TRACE_FOLDER": str(traces),
    }
    arguments = ("--model-repository", str(MODELS), "--rag-store", str(folder / "rag.sqlite"))
    with running_command(folder / "log", *arguments, environment=environment) as server:
        server.wait_ready()
        with server.client() as client:
            document = {"content": "# Pumps\n\nThe pump is oiled every 40 days.\n", "headers": MARKDOWN}
            client.put("/v1/rag/docs/documents/pumps.md", **document).raise_for_status()  # type: ignore[arg-type]
        yield TracedServer(server.pid, server.base_url, server.grpc_address, traces)


MARKDOWN = {"content-type": "text/markdown"}


def ask_chat(server: TracedServer) -> None:
    """Stream a chat completion of the language model."""
    body = {"model": "rill", "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": "Hello!"}]}
    with httpx.stream("POST", f"{server.base_url}/v1/chat/completions", json=body, timeout=PATIENCE_S) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")


def ask_stream(server: TracedServer) -> None:
    """Stream from the language model over gRPC's ModelStreamInfer."""
    responses: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client = triton.InferenceServerClient(server.grpc_address)
    client.start_stream(lambda result, error: responses.put((result, error)))
    inputs = []
    for name, datatype, array in (
        ("text_input", "BYTES", np.array([b"Hello"], object)),
        ("stream", "BOOL", np.array([True])),
        ("max_tokens", "INT32", np.array([8], np.int32)),
    ):
        inputs.append(triton.InferInput(name, [1], datatype))
        inputs[-1].set_data_from_numpy(array)
    client.async_stream_infer("rill", inputs, enable_empty_final_response=True)
    is_final = False
    while not is_final:
        result, error = responses.get(timeout=PATIENCE_S)
        assert error is None, error
        is_final = result.get_response().parameters["triton_final_response"].bool_param
    client.stop_stream()
    client.close()


def ask_documents(server: TracedServer) -> None:
    """Ask the bundled pipeline a question about a collection."""
    body = {"question": "How often is the pump oiled?", "stream": False}
    httpx.post(f"{server.base_url}/v1/rag/docs/query", json=body, timeout=PATIENCE_S).raise_for_status()


REQUESTS = {"chat": ask_chat, "ModelStreamInfer": ask_stream, "rag": ask_documents}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, traced_server(Path(folder)) as server:
        for name, request in REQUESTS.items():
            files = server.files_of(request)
            sys.stdout.write(f"{name}: {len(files)} files\n")
            sys.stdout.writelines(f"  {file}\n" for file in files)


if __name__ == "__main__":
    main()
