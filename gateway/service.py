"""The one data plane under every protocol: finds models, streams from them, and counts open requests."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from sluice.engine.client.interface import Engine
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.gateway.adapters import RuntimeAdapters
from sluice.gateway.calls import CallLog, answer_scope, is_visible, keeps_answers, note_model
from sluice.gateway.encoding import EncodingModels
from sluice.gateway.health import Phase, ProbeResult, ServerHealth
from sluice.gateway.ledger.ledger import CallLedger
from sluice.gateway.listeners import GrpcEndpoint
from sluice.gateway.live_requests import LiveRequests
from sluice.gateway.profiler import Profiler
from sluice.gateway.quotas.store import QuotaStore
from sluice.gateway.routing import RouteTable
from sluice.gateway.streams.store import StreamStore
from sluice.gateway.telemetry.metrics import GatewayMetrics
from sluice.gateway.tracing.timelines import Timelines
from sluice.gateway.tracing.tracer import Tracer
from sluice.gateway.v2.log_settings import LogSettings
from sluice.gateway.v2.server import PROTOCOL_VERSION, ServerIdentity
from sluice.gateway.v2.shared_memory import SharedMemoryRegistry
from sluice.gateway.v2.trace import TraceSettings
from sluice.pipelines.answers.cache import AnswerCache, AnswerSource, Embedder
from sluice.pipelines.llm.model import LlmModel
from sluice.pipelines.llm.text import LlmText
from sluice.pipelines.llm.text_models import (
    choose_text_model,
    find_owner,
    list_text_models,
    model_and_adapter,
    split_name,
)
from sluice.pipelines.rag.encoder import TextEncoder
from sluice.pipelines.rag.library import DocumentLibrary
from sluice.pipelines.rag.llm_encoder import LlmEncoder
from sluice.pipelines.routes.settings import RouteSettings
from sluice.pipelines.routes.text import RoutedText
from sluice.pipelines.text.model import TextModel, text_model_of
from sluice.pipelines.text.stream import OpenTexts
from sluice.pipelines.text.types import TextEvent, TextRequest
from sluice.serving.model import Model
from sluice.serving.repository.repository import ModelRepository
from sluice.serving.request import InferRequest

LATEST = -1
_ABORTED_S = 1.0
"""Longest time for streams of language models to end with the error of `abort_all`."""


class InferenceService:
    """Serves the models of one repository. Lives on the event loop's thread.

    Models serve as soon as they are loaded; the server is ready from `begin_serving` on. While draining it refuses new
    requests; open ones go on until they end or `abort_all` ends them.
    """

    def __init__(
        self,
        repository: ModelRepository,
        metrics: GatewayMetrics,
        heartbeat_timeout_s: float,
        *,
        is_strictly_ready: bool = True,
        identity: ServerIdentity | None = None,
        trace: TraceSettings | None = None,
        tracer: Tracer | None = None,
        log_settings: LogSettings | None = None,
        library: DocumentLibrary | None = None,
        calls: CallLog | None = None,
        ledger: CallLedger | None = None,
        takes_model_files: bool = False,
        allows_lora_updates: bool = False,
        allows_client_shm: bool = False,
        routes: Mapping[str, RouteSettings] | None = None,
        answers: AnswerCache | None = None,
        closes_last: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`routes` are names that stand for models. `answers` keeps those of routes and keys that want it.
        `closes_last` are awaited after everything else is closed. `library` None: no collections of documents. `calls`
        None: nobody is asked for a key. `ledger` None: no usage is kept."""
        self.repository = repository
        self.metrics = metrics
        self.calls = calls or CallLog()
        self.ledger = ledger
        self.identity = identity or ServerIdentity(name="triton", version=PROTOCOL_VERSION)
        self.shared_memory = SharedMemoryRegistry(allows_client_shm)
        self.trace = trace or TraceSettings()
        self.tracer = tracer or Tracer()
        self.timelines = Timelines(self.tracer.timelines)
        self.profiler = Profiler(self.language_models, self.tracer.timelines)
        self.log_settings = log_settings or LogSettings()
        self.library = library
        self.takes_model_files = takes_model_files
        self.adapters = RuntimeAdapters(self.language_models, is_allowed=allows_lora_updates)
        self.live = LiveRequests(self.language_models)
        self._is_strictly_ready = is_strictly_ready
        self._health = ServerHealth(self.engines, self._repository_problem, heartbeat_timeout_s)
        self.counted_elsewhere: Callable[[], Iterable[Metric]] = tuple
        """Returns what the server's other processes have counted until a moment ago."""
        self.gather: Callable[[], Awaitable[CollectorRegistry]] = self._own_registry
        """Returns the metrics of the whole server."""
        self.quotas: QuotaStore | None = None
        """Where use is counted; None where it is not."""
        self.notices: list[Callable[[], str]] = []
        """Each says what is not as it should be, or ""."""
        self.watchers: list[Callable[[], None]] = []
        """Called about once a second while the server serves."""
        self.grpc: GrpcEndpoint | None = None
        """None where gRPC is not served, or not yet."""
        self.streams: StreamStore | None = None
        """The streams that are kept; None before the applications are made."""
        self._closes_last = list(closes_last)
        self._texts = OpenTexts()
        self.encoding = EncodingModels(repository, self.find, lambda: self._visible(repository.models()))
        """The models that turn texts into vectors, scores or labels."""
        self.answers = answers
        self._routed = frozenset(routes or {})
        self.routes = RouteTable(routes or {}, self._find_target, self._find_encoder, answers)

    # --- models ---

    def find(self, name: str, version: int = LATEST) -> Model:
        """Return the model `name`. Raises NOT_FOUND in Triton's words, and UNAVAILABLE while it cannot serve."""
        self._health.refuse_if_draining()
        self._note_model(name)
        try:
            return self.repository.find(name, version)
        except SluiceError as error:
            raise self._health.explain_absence(name, error) from None

    def route(self, name: str, version: int = LATEST, key: str = "") -> Model:
        """Find a model like `find`, for inference: where versions have weights, `key` chooses the version."""
        self._health.refuse_if_draining()
        self._note_model(name)
        try:
            return self.repository.route(name, version, key)
        except SluiceError as error:
            raise self._health.explain_absence(name, error) from None

    def has_weights(self, name: str) -> bool:
        """Whether `route` uses the key of a request to the model `name`. Raises NOT_FOUND."""
        return self.repository.has_weights(name)

    def _note_model(self, name: str, adapter: str = "", *, is_checked: bool = True) -> None:
        if self.calls.is_active:
            note_model(name, adapter, is_checked=is_checked)

    def route_sequence(self, model: Model, request: InferRequest, version: int = LATEST, key: str = "") -> Model:
        """Return the version for a request that was parsed for `model`: all requests of a sequence get the same one.

        `model` was found by `version` and `key`; where either was given, it is `model` itself.
        """
        if version != LATEST or key or not request.correlation_id:
            return model
        return self.repository.route(model.name, LATEST, str(request.correlation_id))

    def llm(self, name: str, key: str = "") -> TextModel:
        """Return the language model `name`, the pipeline with one at its end, or the route; `base:adapter` has a LoRA
        adapter, and so has `adapter` where one model has it.

        Where versions have weights, `key` chooses one. Raises NOT_FOUND in OpenAI's words, and UNAVAILABLE while the
        model cannot serve.
        """
        self._health.refuse_if_draining()
        if name in self._routed:
            return self.routes.text(name, key)
        self._note_model(name, is_checked=False)
        try:
            found = self._find_plain(name, key) or self._find_adapter(name, key)
        except SluiceError as error:
            raise self._health.explain_absence(name, error) from None
        if self.calls.is_active:
            self._note_model(*model_and_adapter(found))
        return _living(found)

    def _find_target(self, name: str, key: str) -> TextModel:
        """Return the text model of a route's target, whoever may use it. Raises as `llm`."""
        found = self._find_plain(name, key)
        return _living(found or self._choose_adapter(name, key, self.repository.models()))

    def _find_encoder(self, name: str) -> TextEncoder | LlmEncoder:
        """Return the encoder of a route's target, whoever may use it. Raises as `EncodingModels.encoder`."""
        model = self.repository.find(name)
        if not self.encoding.is_encoder(model):
            raise invalid("model", f"model {name!r} has no embeddings")
        return self.encoding.open(model)

    def _find_plain(self, name: str, key: str) -> TextModel | None:
        """Return the text model of the model `name`; None where none with a text model serves under that name."""
        try:
            model = self.repository.route(name, LATEST, key)
        except SluiceError:
            return None
        if isinstance(model, LlmModel):
            found: TextModel | None = None if model.text.info.embedding_size else model.text
        else:
            found = text_model_of(model)
        return found if found is not None and found.name == name else None

    def _find_adapter(self, name: str, key: str) -> TextModel:
        """Return the adapter that `name` means. Raises NOT_FOUND, which lists the models."""
        if self.encoding.has_embeddings(name):
            raise invalid("model", f"model {name!r} gives embeddings and no text; POST /v1/embeddings")
        if name in {each.name for each in self.encoding.rerankers()}:
            raise invalid("model", f"model {name!r} gives scores and no text; POST /v1/score")
        return self._choose_adapter(name, key, self._visible(self.repository.models()))

    def _choose_adapter(self, name: str, key: str, models: Sequence[Model]) -> TextModel:
        owner = find_owner(models, name)
        if owner is not None:
            return choose_text_model(self.repository.route(owner, LATEST, key), name)
        base, adapter = split_name(name, [model.name for model in models if text_model_of(model) is not None])
        return choose_text_model(self.repository.route(base, LATEST, key), adapter)

    def text_models(self) -> list[TextModel]:
        """Return the highest version of everything that `llm` finds.

        Language models come first, then pipelines, then routes, each by name; adapters follow their model.
        """
        models = list(list_text_models(sorted(self._visible(self.repository.models()), key=_is_pipeline)))
        if self.calls.is_active:
            models = [each for each in models if is_visible(*model_and_adapter(each))]
        return [*models, *self.routes.texts()]

    def _visible(self, models: Iterable[Model]) -> list[Model]:
        """Return the models that the sender of the current request may use."""
        return [each for each in models if not self.calls.is_active or is_visible(each.name)]

    def embedder(self, name: str) -> Embedder:
        """Return what encodes texts for a request: the embedding model `name`, or the route. Raises as
        `EncodingModels.encoder`."""
        if name in self._routed:
            self._health.refuse_if_draining()
            return self.routes.encoder(name)
        source = AnswerSource(self.answers if keeps_answers() else None, answer_scope())
        return source.wrap(self.encoding.encoder(name))

    def llms(self) -> list[LlmText]:
        """Return the highest version of every loaded language model of our own."""
        return list({model.name: model.text for model in self.language_models()}.values())

    def engines(self) -> list[Engine]:
        """Return the engines of every version of all language models."""
        return [model.engine for model in self.language_models()]

    def language_models(self) -> list[LlmModel]:
        """Return every version of all language models of our own."""
        return [model for model in self.repository.models() if isinstance(model, LlmModel)]

    # --- health ---

    def liveness(self) -> ProbeResult:
        """Whether the server should be left running."""
        return self._health.liveness()

    def readiness(self) -> ProbeResult:
        """Whether a new request would be served now."""
        return self._health.readiness()

    def degradations(self) -> list[str]:
        """Say what is not as it should be while requests are served."""
        return [problem for each in self.notices if (problem := each())]

    def is_live(self) -> bool:
        return self.liveness().is_ok

    def is_ready(self) -> bool:
        return self.readiness().is_ok

    def is_model_ready(self, name: str, version: int = LATEST) -> bool:
        """Whether that version is loaded and would serve now; for an adapter, whether its model is."""
        try:
            return self.find(self.adapters.base_of(name) or name, version).is_ready
        except SluiceError:
            return False

    async def _own_registry(self) -> CollectorRegistry:
        return self.metrics.registry

    @property
    def phase(self) -> Phase:
        return self._health.phase

    def _repository_problem(self) -> str:
        return self.repository.problem if self._is_strictly_ready else ""

    # --- requests ---

    def generate(self, model: TextModel, request: TextRequest) -> AsyncGenerator[TextEvent, None]:
        """Return the stream of the answer to `request`. Raises UNAVAILABLE while draining.

        Every other refusal (INVALID, OVERLOADED, UNAVAILABLE) is raised, as SluiceError, before the first event.
        Closing the stream early cancels the request in the engine. It counts as open from its start to its end.
        """
        self._health.refuse_if_draining()
        if self.answers is not None and keeps_answers() and not isinstance(model, RoutedText):
            return AnswerSource(self.answers, answer_scope()).answer(model, request, self._texts)
        return model.generate(request, self._texts)

    def begin_serving(self) -> None:
        """Be ready from here on: the models are loaded and tested."""
        self._health.phase = Phase.SERVING

    # --- shutdown ---

    def begin_drain(self) -> None:
        """Refuse new requests from here on; open ones go on."""
        self._health.phase = Phase.DRAINING

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait for open requests. Return whether all ended within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._texts.wait_idle()
                for model in self.repository.models():
                    await model.wait_idle()
        except TimeoutError:
            return False
        return True

    async def abort_all(self, error: SluiceError) -> None:
        """End every open request: streams of language models with `error`, which clients see as an error event. Streams
        that other gateways can go on with are left to them."""
        if self.streams is not None and self.streams.shared is not None:
            await self.streams.shared.close()
        for engine in self.engines():
            engine.abort_all(error)
        models = self.repository.models()
        with suppress(TimeoutError):  # ensembles pass that error on, unless they close before it reaches them
            async with asyncio.timeout(_ABORTED_S):
                await asyncio.gather(*(model.wait_idle() for model in models if isinstance(model, LlmModel)))
        for model in models:
            if not isinstance(model, LlmModel):
                await model.close()

    async def close(self) -> None:
        """Unload every model and free shared memory. Requests that are still open end in an error."""
        await self.repository.close(0)
        self.shared_memory.close()
        self.trace.close()
        await self.trace.close_collector()
        self.log_settings.close()
        for close in self._closes_last:
            await close()

    def close_last(self, close: Callable[[], Awaitable[None]]) -> None:
        """Have `close` awaited after everything that was to be closed until now."""
        self._closes_last.append(close)

    @property
    def num_open(self) -> int:
        """Number of requests that have begun and not ended."""
        return self._texts.count + sum(model.num_in_flight for model in self.repository.models())


def _living(text: TextModel) -> TextModel:
    """Return the text model. Raises UNAVAILABLE where its engine is dead."""
    if text.failure is not None:
        raise SluiceError(ErrorCode.UNAVAILABLE, f"the engine failed: {text.failure}")
    return text


def _is_pipeline(model: Model) -> bool:
    return model.spec.platform == "ensemble"
