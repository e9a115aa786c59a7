"""The real application on a real server, over an engine whose runner has no model, or over a given engine."""

import asyncio
import json
import socket
import threading
from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import pytest

from sluice.engine.arrays import FloatArray
from sluice.engine.client.base import EngineClient
from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import StepBatch
from sluice.errors import invalid
from sluice.gateway.answers.batches.service import BatchService
from sluice.gateway.answers.streams.store import StreamStore
from sluice.gateway.api.apis import open_streams
from sluice.gateway.api.app import create_app
from sluice.gateway.calls import CallLog
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.server import Server
from sluice.gateway.tenancy.accounts import Accounts, make_access
from sluice.gateway.tenancy.ledger.ledger import CallLedger
from sluice.pipelines.llm.text import LlmText
from tests.engine.fake_runner import EchoRunner, echo_next
from tests.engine.in_process_client import InProcessEngineClient
from tests.gateway.front.http.portless import Portless, client_of, connect_to, listen_at, listening
from tests.gateway.repositories import empty_server, llm_model
from tests.paths import RILL_TOKENIZER
from tests.waiting import PATIENCE_S

T = TypeVar("T")

MODEL = "rill"
START_S = 300.0
"""How long an engine of another project may take to start."""
END = 5
"""The token that ends an answer."""
_TURNS = 8
"""Turns of the event loop that a token needs at most from the engine to the socket."""


class SteppedRunner(EchoRunner):
    """An echo that lets the server write each token before it makes the next, and that a test can hold."""

    def __init__(self, num_blocks: int, eos_token_ids: tuple[int, ...] = (), max_model_len: int = 1024) -> None:
        super().__init__(num_blocks=num_blocks, eos_token_ids=eos_token_ids, max_model_len=max_model_len)
        self.loop = asyncio.get_running_loop()
        self.error: Exception | None = None
        """Exception that every step raises, where set."""
        self.script: list[int] | None = None
        """Tokens of every answer, instead of the echo; where it is empty, all tokens are equally likely."""
        self._runs_left: int | None = None
        self._tokens: list[list[int]] = []
        """The tokens of each sequence of the last step."""
        self._is_held = False
        self._changed = threading.Condition()

    def read_adapter(self, number: int, name: str, folder: Path) -> Callable[[], None]:
        if folder.name == "broken":
            raise invalid("lora_modules", f"LoRA adapter {name}: {folder} is broken")
        return lambda: None

    def drop_adapters(self, numbers: Collection[int]) -> Callable[[], None]:
        return lambda: None

    def hold_after(self, num_runs: int) -> None:
        """Run `num_runs` more steps and then wait."""
        self._set_runs_left(num_runs)

    def release(self) -> None:
        self._set_runs_left(None)

    def wait_held(self) -> None:
        """Wait until the steps before the hold are done and another one is due."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._is_held, PATIENCE_S)

    def _set_runs_left(self, num_runs: int | None) -> None:
        with self._changed:
            self._runs_left = num_runs
            self._changed.notify_all()

    def compute(self, batch: StepBatch) -> FloatArray:
        asyncio.run_coroutine_threadsafe(_some_turns(), self.loop).result(PATIENCE_S)
        self._wait_for_leave()
        if self.error is not None:
            raise self.error
        logits = super().compute(batch)
        return logits if self.script is None else self._follow(self.script, logits)

    def _store_and_read(self, batch: StepBatch, i: int, block_size: int) -> list[int]:
        tokens = super()._store_and_read(batch, i, block_size)
        self._tokens = [*self._tokens[:i], tokens]
        return tokens

    def _follow(self, script: list[int], logits: FloatArray) -> FloatArray:
        """Return logits for the tokens of the script that follow those that each sequence has."""
        logits[:] = 0.0
        for row, tokens in zip(logits, self._tokens, strict=True):
            done = max(n for n in range(len(script) + 1) if tokens[len(tokens) - n :] == script[:n])
            if script:
                row[script[done] if done < len(script) else END] = 100.0
        return logits

    def _wait_for_leave(self) -> None:
        with self._changed:
            self._is_held = self._runs_left == 0
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self._runs_left != 0, PATIENCE_S), "the test forgot the runner"
            self._is_held = False
            if self._runs_left is not None:
                self._runs_left -= 1


async def _some_turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@dataclass
class LiveServer(Portless):
    """A server with one model, and its parts."""

    server: Server
    streams: StreamStore
    model: LlmText
    stand_in: tuple[InProcessEngineClient, SteppedRunner] | None
    """None over an engine that was given."""
    batches: BatchService
    client: httpx.Client

    @property
    def is_paced(self) -> bool:
        """Whether each token is written before the next one is made, so that no two share a chunk."""
        return self.stand_in is not None

    @property
    def engine(self) -> InProcessEngineClient:
        return self._stand_in[0]

    @property
    def runner(self) -> SteppedRunner:
        return self._stand_in[1]

    @property
    def _stand_in(self) -> tuple[InProcessEngineClient, SteppedRunner]:
        if self.stand_in is None:
            pytest.skip("this test tells the stand-in for an engine what to do")
        return self.stand_in

    def say(self, text: str) -> None:
        """Have the model write `text` in each answer."""
        self.runner.script = self.model.tokenizer.encode_words(text, "script")

    def request(self, method: str, path: str, **settings: Any) -> httpx.Response:
        return self.client.request(method, path, **settings)

    def get(self, path: str, **settings: Any) -> httpx.Response:
        return self.request("GET", path, **settings)

    def post(self, path: str, body: Any = None, **settings: Any) -> httpx.Response:
        """POST `body`: bytes as they are, anything else as JSON."""
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        return self.request("POST", path, **content, **settings)

    def send(self, path: str, body: Any) -> socket.socket:
        """Send a request and return the connection, which the caller may read or close."""
        content = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n\r\n"
        connection = connect_to(self.path)
        connection.sendall(head.encode() + content)
        return connection

    def wait_idle(self) -> None:
        """Wait until the last stream is closed."""
        assert self.run(self.server.plane.wait_idle(PATIENCE_S))

    def blocks_used_after_step(self) -> int:
        """Return the KV blocks in use after a small request, which the engine takes after all earlier commands."""
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1}
        assert self.post("/v1/completions", body).status_code == 200
        return self.engine.stats.num_blocks_used

    def echo(self, prompt_ids: list[int], num_tokens: int) -> str:
        """Return the text of the runner's tokens, computed apart from the server."""
        ids = list(prompt_ids)
        for _ in range(num_tokens):
            ids.append(echo_next(ids, self.runner.info.vocab_size))
        detokenizer = self.model.tokenizer.detokenizer()
        return detokenizer.feed(ids[len(prompt_ids) :]) + detokenizer.flush()


MakeEngine = Callable[[], tuple[EngineClient, SteppedRunner | None]]
"""Called on the server's event loop."""


@asynccontextmanager
async def _application(
    config: ServeConfig,
    make_engine: MakeEngine,
    is_loaded: bool,
    checkpoint: Path,
    path: Path,
    ledger: CallLedger | None,
) -> AsyncIterator[LiveServer]:
    engine, runner = make_engine()
    stand_in = (engine, runner) if isinstance(engine, InProcessEngineClient) and runner is not None else None
    await engine.start()
    access = make_access(config)
    await access.ring.start()
    server = empty_server(config, accounts=Accounts(CallLog(access), ledger))
    server.rooms.join(close=access.close)
    model = llm_model(MODEL, checkpoint, engine, server.metrics)
    if is_loaded:
        server.plane.repository.add(model)
        await server.plane.repository.start()
        server.plane.health.begin_serving()
    batches = BatchService(server.plane, server.rooms, config)
    streams = open_streams(server.rooms, config.streams)
    app = create_app(server, config, streams, batches)
    batches.start(app.answer)
    try:
        async with AsyncExitStack() as ports, listening(app, listen_at(path)):
            try:
                loop = asyncio.get_running_loop()
                parts = server, streams.store, model.text, stand_in, batches
                yield LiveServer(path, app, loop, ports, *parts, client_of(path))
            finally:
                if runner is not None:
                    runner.release()
                await batches.close()
    finally:
        await server.rooms.close()
        await engine.stop()


@contextmanager
def live_server(
    config: ServeConfig | None = None,
    engine_config: EngineConfig | None = None,
    num_blocks: int = 256,
    is_loaded: bool = True,
    engine_class: type[InProcessEngineClient] = InProcessEngineClient,
    checkpoint: Path = RILL_TOKENIZER,
    given_engine: Callable[[], EngineClient] | None = None,
    on_port: bool = False,
    ledger: CallLedger | None = None,
    max_model_len: int = 1024,
) -> Iterator[LiveServer]:
    """Run a server on a thread of its own, for blocking clients. `given_engine` makes an engine in place of a
    stand-in. With `on_port` its client has an address, as it needs where addresses decide."""

    def make_engine() -> tuple[EngineClient, SteppedRunner | None]:
        if given_engine is not None:
            return given_engine(), None
        runner = SteppedRunner(num_blocks, () if checkpoint is RILL_TOKENIZER else (END,), max_model_len)
        return engine_class(engine_config or EngineConfig(model_path="none"), runner), runner

    ready, over = threading.Event(), threading.Event()
    started: list[LiveServer] = []

    async def serve() -> None:
        with TemporaryDirectory() as folder:
            given = config or ServeConfig()
            own = replace(given, batches=replace(given.batches, state_path=folder))
            async with _application(own, make_engine, is_loaded, checkpoint, Path(folder) / "http", ledger) as live:
                started.append(live)
                ready.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S if given_engine is None else START_S)
        live = started[0]
        if on_port:
            live.client = httpx.Client(base_url=live.url, timeout=PATIENCE_S)
        with live.client:
            yield live
    finally:
        over.set()
        thread.join(PATIENCE_S)
