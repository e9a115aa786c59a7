"""Dynamo's seat for an engine (`dynamo.common.backend.LLMEngine`), with ours in it. Dynamo's own Worker registers it,
brings requests, watches for disconnects and shuts it down.

Its requests are those of the model that the gateway serves, too (`LlmText`). They come as tokens and are answered with
tokens, which Dynamo pulls from a generator: nothing here makes text of a body (`sluice.gateway.api.translators`).
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dynamo.common.backend import EngineConfig as Registration
from dynamo.common.backend import LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.health_check import build_health_check_payload
from dynamo.common.backend.publisher import ComponentSnapshot, KvEventSource, ZmqSource
from dynamo.common.backend.run import run
from dynamo.common.utils.token_ids import normalize_request_token_ids
from dynamo.llm import exceptions

from sluice.engine.client.process import ProcessEngineClient
from sluice.engine.client.stream import GenerationStream
from sluice.engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.dynamo.chunks import Chunk, ChunkWriter
from sluice.gateway.dynamo.kv_events import find_kv_events
from sluice.gateway.dynamo.requests import parse_request, shown
from sluice.gateway.options.dynamo import DynamoOptions
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import load_text
from sluice.pipelines.text.types import EncodedPrompt

log = logging.getLogger(__name__)

ERRORS: dict[ErrorCode, type[Exception]] = {
    ErrorCode.INVALID: exceptions.InvalidArgument,
    ErrorCode.UNAUTHENTICATED: exceptions.InvalidArgument,
    ErrorCode.FORBIDDEN: exceptions.InvalidArgument,
    ErrorCode.NOT_FOUND: exceptions.InvalidArgument,
    ErrorCode.METHOD_NOT_ALLOWED: exceptions.InvalidArgument,
    ErrorCode.TOO_LARGE: exceptions.InvalidArgument,
    ErrorCode.UNIMPLEMENTED: exceptions.InvalidArgument,
    ErrorCode.ALREADY_EXISTS: exceptions.InvalidArgument,
    ErrorCode.CANCELLED: exceptions.Cancelled,
    ErrorCode.OVERLOADED: exceptions.WorkerUnavailable,
    ErrorCode.UNAVAILABLE: exceptions.EngineShutdown,
    ErrorCode.DEADLINE: exceptions.ConnectionTimeout,
    ErrorCode.INTERNAL: exceptions.Unknown,
    ErrorCode.UNKNOWN: exceptions.Unknown,
}
"""Dynamo's exceptions by our codes."""
PUBLISH_S = 0.25
"""How often the router hears how full the KV cache is."""
_RANK = 0


class SluiceWorker(LLMEngine):  # type: ignore[misc]
    """One engine of ours as a worker of Dynamo. All methods run on Dynamo's event loop."""

    def __init__(self, config: EngineConfig, served_name: str, heartbeat_timeout_s: float) -> None:
        self._config = config
        self._served_name = served_name
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._engine: ProcessEngineClient | None = None
        self._text: LlmText | None = None
        self._streams: dict[str, GenerationStream] = {}
        """Open streams by the id of Dynamo's context."""
        self._publisher: Any = None
        self._publishing: asyncio.Task[None] | None = None

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> "tuple[SluiceWorker, WorkerConfig]":
        raise NotImplementedError("`sluice dynamo-worker` reads the arguments, and calls serve_worker")

    async def start(self, worker_id: int) -> Registration:
        """Load the model. Raises EngineShutdown where that fails."""
        path = Path(self._config.model_path)
        tokenizer = self._config.tokenizer_path
        try:
            engine = self._engine = ProcessEngineClient(self._config, heartbeat_timeout_s=self._heartbeat_timeout_s)
            await engine.start()
            place = None if tokenizer is None else Path(tokenizer)
            load = partial(load_text, LlmText, self._served_name, path, engine, tokenizer_path=place)
            self._text = await asyncio.to_thread(load)
        except SluiceError as error:
            raise _translate(error) from error
        info = engine.info
        if info.embedding_size:
            raise exceptions.InvalidArgument(f"{path} embeds; Dynamo's front end has no use for that here")
        log.info("worker %d serves %s on %s", worker_id, self._served_name, info.runtime)
        return Registration(
            model=str(path),
            served_model_name=self._served_name,
            model_aliases=[*info.adapters],
            llm=LlmRegistration(
                context_length=info.max_model_len,
                kv_cache_block_size=info.block_size,
                total_kv_blocks=info.num_blocks,
                max_num_seqs=info.max_num_seqs,
                max_num_batched_tokens=info.max_num_batched_tokens,
            ),
        )

    async def generate(self, request: Any, context: Any) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of the answer to a request. Raises Dynamo's exceptions."""
        text = self._text
        assert text is not None, "Dynamo sends requests after start"
        normalize_request_token_ids(request)
        context_id = context.id()
        stream: GenerationStream | None = None
        try:
            asked = parse_request(request, context_id, text.info.adapters)
            prompt = asked.prompt
            assert isinstance(prompt, EncodedPrompt), "it came as tokens"
            writer = ChunkWriter(len(prompt.token_ids))
            sampling = await text.sampling(asked, len(prompt.token_ids))
            stream = self._streams[context_id] = text.submit(asked, prompt, sampling)
            async for event in stream:
                yield writer.write(event)
        except SluiceError as error:
            if error.code is not ErrorCode.CANCELLED:
                raise _translate(error) from error
            yield writer.cancelled()
        finally:
            self._streams.pop(context_id, None)
            if stream is not None:
                stream.cancel()

    async def abort(self, context: Any) -> None:
        """End the answer to a request that nobody waits for any more, and free its blocks."""
        stream = self._streams.get(context.id())
        if stream is not None:
            stream.cancel()
            stream.fail(SluiceError(ErrorCode.CANCELLED, "the client has gone"))

    async def kv_event_sources(self) -> list[KvEventSource]:
        """Return where the engine tells what its prefix cache gains and loses; nothing where it does not."""
        found = find_kv_events(self._config)
        return [] if found is None else [ZmqSource(endpoint=found.endpoint, topic=found.topic, dp_rank=_RANK)]

    def component_metrics_dp_ranks(self) -> list[int]:
        return [_RANK]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._publisher = publisher

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self._publishing = asyncio.create_task(self._publish(), name="dynamo-load")

    async def _publish(self) -> None:
        """Tell the router how full the KV cache is, until cancelled."""
        assert self._engine is not None
        while True:
            if self._publisher is not None:
                self._publisher.publish(_RANK, self._snapshot(self._engine))
            await asyncio.sleep(PUBLISH_S)

    def _snapshot(self, engine: ProcessEngineClient) -> ComponentSnapshot:
        stats, total = engine.stats, engine.info.num_blocks
        prompt_tokens = stats.prompt_tokens_total
        return ComponentSnapshot(
            kv_used_blocks=stats.num_blocks_used,
            kv_total_blocks=total,
            gpu_cache_usage=stats.num_blocks_used / total if total else 0.0,
            dp_rank=_RANK,
            kv_cache_hit_rate=stats.cached_tokens_total / prompt_tokens if prompt_tokens else None,
        )

    async def health_check_payload(self) -> dict[str, Any] | None:
        """Return a request of one token, which Dynamo sends while the worker is idle to see that it lives."""
        payload: dict[str, Any] = build_health_check_payload(bos_token_id=0)
        return payload

    async def cleanup(self) -> None:
        """End the engine. Legal after a failed start, and twice."""
        if self._publishing is not None:
            self._publishing.cancel()
            with suppress(asyncio.CancelledError):
                await self._publishing
            self._publishing = None
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.stop()


def _translate(error: SluiceError) -> Exception:
    return ERRORS[error.code](shown(error))


def serve_worker(
    config: EngineConfig, served_name: str, options: DynamoOptions, heartbeat_timeout_s: float = 10.0
) -> None:
    """Serve the model under Dynamo until SIGTERM or Ctrl-C. Raises UNAVAILABLE where it cannot start."""

    async def make(argv: list[str] | None) -> tuple[SluiceWorker, WorkerConfig]:
        worker = SluiceWorker(config, served_name, heartbeat_timeout_s)
        return worker, WorkerConfig(
            namespace=options.namespace,
            component=options.component,
            endpoint=options.endpoint,
            model_name=config.model_path,
            served_model_name=served_name,
            endpoint_types=options.endpoint_types,
            discovery_backend=options.discovery_backend,
            request_plane=options.request_plane,
            event_plane=options.event_plane,
            custom_jinja_template=options.custom_jinja_template,
            tool_call_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )

    try:
        run(SluiceWorker, engine_factory=make)
    except Exception as error:  # Dynamo's Worker, which is not Python, raises no class of its own
        log.debug("the worker ended", exc_info=True)
        raise SluiceError(ErrorCode.UNAVAILABLE, str(error)) from error
