"""The real application over a real library, for blocking clients. Only encoder and language model are stand-ins."""

import asyncio
import hashlib
import re
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import httpx
import numpy as np
from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.client.stream import Consumer
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.assembly import make_application
from sluice.gateway.calls import CallLog
from sluice.gateway.options.config import ServeConfig
from sluice.gateway.server import Server
from sluice.gateway.tenancy.accounts import Accounts, make_access
from sluice.pipelines.encoding import Vector, Vectors
from sluice.pipelines.encoding.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary, LibrarySettings
from sluice.pipelines.rag.stores.sqlite.store import SqliteStore
from sluice.pipelines.rag.types import CollectionInfo
from sluice.pipelines.text.model import TextModel, text_model_of
from sluice.pipelines.text.stream import give
from sluice.pipelines.text.types import AS_IT_IS, Conversation, Prompt, PromptForm, TextEvent, TextRequest
from sluice.serving.job import InferJob
from sluice.serving.model import Model
from sluice.serving.spec import build_spec
from tests.gateway.front.http.portless import Portless, client_of, listen_at, listening
from tests.gateway.repositories import empty_server
from tests.waiting import PATIENCE_S

T = TypeVar("T")
DIM = 32


class SwitchableStore(SqliteStore):
    """A store in a file of its own, which a test can make unreachable."""

    is_down = False

    async def collections(self) -> list[CollectionInfo]:
        self._check()
        return await super().collections()

    async def collection(self, name: str) -> CollectionInfo:
        self._check()
        return await super().collection(name)

    def _check(self) -> None:
        if self.is_down:
            raise SluiceError(ErrorCode.UNAVAILABLE, "test store is down", retry_after_s=1)


class WordEncoder(TextEncoder):
    """Encodes a text as the sum of its words, each of which has a direction of its own. Tokens are words."""

    def __init__(self, name: str = "query_encoder") -> None:
        self.name = name

    async def dim(self) -> int:
        return DIM

    async def encode_documents(self, texts: Sequence[str]) -> Vectors:
        return np.stack([_vector(text) for text in texts])

    async def encode_query(self, text: str) -> Vector:
        return _vector(text)

    async def token_starts(self, text: str) -> list[int]:
        return [word.start() for word in re.finditer(r"\S+", text)]


def _vector(text: str) -> Vector:
    total = np.full(DIM, 1e-3, np.float32)
    for word in re.findall(r"\w+", text.lower()):
        seed = int.from_bytes(hashlib.sha256(word.encode()).digest()[:4])
        total += np.random.default_rng(seed).standard_normal(DIM).astype(np.float32)
    return total / np.linalg.norm(total)


@dataclass
class ScriptedPipeline:
    """Answers with the events that a test sets, and records requests."""

    name: str = "rag_pipeline"
    takes_parameters: bool = True
    version: str = "1"
    created: int = 0
    max_model_len: int | None = None
    max_beam_width: int = 1
    parent: str | None = None
    failure: str | None = None
    fingerprint: str = "fp_0"
    template_names: frozenset[str] = frozenset()
    max_images: int = 0
    events: list[TextEvent | Exception] = field(default_factory=list)
    requests: list[TextRequest] = field(default_factory=list)
    may_continue: asyncio.Event = field(default_factory=asyncio.Event)
    """The events after the first two wait until this is set."""
    was_closed: threading.Event = field(default_factory=threading.Event)

    def adapt(self, conversation: Conversation) -> Conversation:
        return conversation

    async def prepare_shared(self, prompt: Prompt, form: PromptForm = AS_IT_IS) -> Prompt:
        return prompt

    def chat_reader(self, request: TextRequest) -> None:
        return None

    async def generate(self, request: TextRequest, consumer: Consumer[TextEvent]) -> None:
        self.requests.append(request)
        try:
            for number, event in enumerate(self.events):
                if number == 2:
                    await self.may_continue.wait()
                if isinstance(event, Exception):
                    raise event
                await give(consumer, event)
        finally:
            self.was_closed.set()


class ChatModel(Model):
    """A repository model whose text face is the pipeline."""

    def __init__(self, pipeline: ScriptedPipeline) -> None:
        config = text_format.Parse(f'name: "{pipeline.name}" backend: "test"', ModelConfig())
        super().__init__(config, build_spec(config, 1))
        self._pipeline = pipeline

    @property
    def pipeline(self) -> TextModel:
        return self._pipeline

    async def close(self) -> None:
        pass

    def _start(self, job: InferJob) -> None:
        raise AssertionError("asked by its tensors")


@text_model_of.register
def _(model: ChatModel) -> TextModel:
    return model.pipeline


@dataclass
class RagServer(Portless):
    """A server with a library, and its parts."""

    server: Server
    library: DocumentLibrary
    store: SwitchableStore
    pipeline: ScriptedPipeline
    client: httpx.Client

    def reset(self) -> None:
        """Delete all collections and reset the pipeline."""
        self.store.is_down = False
        for info in self.run(self.library.collections()):
            self.run(self.store.delete_collection(info.spec.name))
        self.pipeline.events.clear()
        self.pipeline.requests.clear()
        self.pipeline.was_closed.clear()
        self.pipeline.may_continue.set()

    def ask(self, method: str, path: str, **settings: Any) -> httpx.Response:
        return self.client.request(method, f"/v1/rag{path}", **settings)

    def add(self, collection: str, *documents: dict[str, Any], **settings: Any) -> httpx.Response:
        return self.ask("POST", f"/{collection}/documents", json={"documents": documents}, **settings)

    def documents(self, collection: str) -> dict[str, str]:
        """Return the content hash of each document by id."""
        listed = self.ask("GET", f"/{collection}/documents", params={"limit": 1000})
        return {each["id"]: each["content_hash"] for each in listed.json()["data"]} if listed.is_success else {}


def statuses(answer: httpx.Response) -> dict[str, str]:
    return {each["id"]: each["status"] for each in answer.json()["data"]}


def text_of(rag: RagServer, document_id: str, collection: str = "docs") -> str:
    text: str = rag.ask("GET", f"/{collection}/documents/{document_id}").json()["text"]
    return text


@asynccontextmanager
async def _application(config: ServeConfig, path: Path) -> AsyncIterator[RagServer]:
    store, pipeline = SwitchableStore(None), ScriptedPipeline()
    library = DocumentLibrary(store, WordEncoder, LibrarySettings())
    access = make_access(replace(config, access=replace(config.access, keys_store="none")))
    server = empty_server(config, accounts=Accounts(CallLog(access)), library=library)
    repository = server.plane.repository
    repository.add(ChatModel(pipeline))
    repository.add(ChatModel(ScriptedPipeline("plain_llm", takes_parameters=False)))
    await repository.start()
    server.plane.health.begin_serving()
    app = make_application(server, config)
    try:
        async with AsyncExitStack() as ports, listening(app, listen_at(path)):
            with client_of(path) as client:
                loop = asyncio.get_running_loop()
                yield RagServer(path, app, loop, ports, server, library, store, pipeline, client)
    finally:
        await library.close()
        await server.rooms.close()


@contextmanager
def rag_server(config: ServeConfig | None = None) -> Iterator[RagServer]:
    """Run a server on a thread of its own, for blocking clients."""
    ready, over = threading.Event(), threading.Event()
    started: list[RagServer] = []

    async def serve() -> None:
        with TemporaryDirectory() as folder:
            async with _application(config or ServeConfig(), Path(folder) / "http") as server:
                started.append(server)
                ready.set()
                await asyncio.to_thread(over.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(PATIENCE_S)
        yield started[0]
    finally:
        over.set()
        thread.join(PATIENCE_S)
