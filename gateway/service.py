"""The one data plane under every protocol: finds the model, streams from it, and knows what is open."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, suppress

from msgspec import structs

from engine.client.base import EngineClient
from gateway.health import Health, Phase, ServerHealth
from gateway.telemetry.metrics import GatewayMetrics
from gateway.v2.description import PROTOCOL_VERSION, ServerIdentity
from gateway.v2.settings import LogSettings, TraceSettings
from gateway.v2.shared_memory import SharedMemoryRegistry
from pipelines.llm.model import LlmModel
from pipelines.llm.services import recorded
from pipelines.llm.text import LlmText
from pipelines.llm.text_models import choose_text_model, list_text_models, split_name
from pipelines.rag.library import DocumentLibrary
from pipelines.text.model import TextModel, text_model_of
from pipelines.text.types import TextEvent, TextRequest
from serving.model import Model
from serving.repository.repository import ModelRepository
from serving.request import InferRequest
from sluice.errors import ErrorCode, SluiceError

LATEST = -1
_ABORTED_S = 1.0
"""How long streams of language models may take to end with the error that they were given."""


class InferenceService:
    """Serves the models of one repository. Lives on the event loop's thread.

    While loading everything is refused; `begin_serving` makes it ready. Once draining it refuses what is new, and what
    is open goes on until it ends or `abort_all` ends it.
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
        log_settings: LogSettings | None = None,
        library: DocumentLibrary | None = None,
        closes_last: Sequence[Callable[[], Awaitable[None]]] = (),
    ) -> None:
        """`closes_last` are called when everything else is closed. `library` None: no collections of documents."""
        self.repository = repository
        self.metrics = metrics
        self.identity = identity or ServerIdentity(name="triton", version=PROTOCOL_VERSION)
        self.shared_memory = SharedMemoryRegistry()
        self.trace = trace or TraceSettings()
        self.log_settings = log_settings or LogSettings()
        self.library = library
        self._is_strictly_ready = is_strictly_ready
        self._health = ServerHealth(self.engines, self._repository_problem, heartbeat_timeout_s)
        self._closes_last = closes_last
        self._num_texts = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- what there is ---

    def find(self, name: str, version: int = LATEST) -> Model:
        """The model `name`. Raises NOT_FOUND in Triton's words, and UNAVAILABLE while it cannot serve."""
        self._health.refuse_unless_serving()
        return self.repository.find(name, version)

    def route(self, name: str, version: int = LATEST, key: str = "") -> Model:
        """As `find`, for inference: where versions have weights, requests of one `key` get one version."""
        self._health.refuse_unless_serving()
        return self.repository.route(name, version, key)

    def has_weights(self, name: str) -> bool:
        """Whether `route` looks at the key of a request to the model `name`. Raises NOT_FOUND."""
        return self.repository.has_weights(name)

    def route_sequence(self, model: Model, request: InferRequest, version: int = LATEST, key: str = "") -> Model:
        """The version for a request that was read for `model`: all of a sequence get one, that of their first's id.

        `version` and `key` are what it was found by; where they say enough, it is `model` itself.
        """
        if version != LATEST or key or not request.correlation_id:
            return model
        return self.repository.route(model.name, LATEST, str(request.correlation_id))

    def llm(self, name: str, key: str = "") -> TextModel:
        """The language model `name`, or the pipeline with one at its end; `base:adapter` with a LoRA adapter.

        Raises NOT_FOUND in OpenAI's way, and UNAVAILABLE while it cannot serve. Where its versions have weights, it is
        the one that `key` falls to.
        """
        self._health.refuse_unless_serving()
        models = self.repository.models()
        base, adapter = split_name(name, [model.name for model in models if text_model_of(model) is not None])
        found = choose_text_model(self.repository.route(base, LATEST, key), adapter)
        if found.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"the engine failed: {found.failure}")
        return found

    def text_models(self) -> list[TextModel]:
        """Everything that `llm` finds, its highest version; none while loading."""
        return list(list_text_models(self.repository.models()))

    def llms(self) -> list[LlmText]:
        """Every loaded language model of our own, its highest version; none while loading."""
        return list({model.name: model.text for model in self._language_models()}.values())

    def engines(self) -> list[EngineClient]:
        """Those of all language models, of every version."""
        return [model.engine for model in self._language_models()]

    def _language_models(self) -> list[LlmModel]:
        return [model for model in self.repository.models() if isinstance(model, LlmModel)]

    # --- how it is ---

    def liveness(self) -> Health:
        """Whether the server should be left running."""
        return self._health.liveness()

    def readiness(self) -> Health:
        """Whether a new request would be served now."""
        return self._health.readiness()

    def is_live(self) -> bool:
        return self.liveness().is_ok

    def is_ready(self) -> bool:
        return self.readiness().is_ok

    def is_model_ready(self, name: str, version: int = LATEST) -> bool:
        """Whether that version is there and would serve now."""
        try:
            return self.find(name, version).is_ready
        except SluiceError:
            return False

    def _repository_problem(self) -> str:
        return self.repository.problem if self._is_strictly_ready else ""

    # --- what it does ---

    async def generate(self, model: TextModel, request: TextRequest, protocol: str) -> AsyncGenerator[TextEvent, None]:
        """Streams the answer to `request`; `protocol` is its label in the metrics.

        Every refusal (INVALID, OVERLOADED, UNAVAILABLE) is raised, as SluiceError, before the first
        event. Who stops early closes the stream, which cancels the request in the engine.
        """
        self._health.refuse_if_draining()
        asked = structs.replace(request, protocol=protocol)
        events = model.generate(asked)
        if not model.is_measured:
            events = recorded(events, self.metrics.open_request(model.parent or model.name, protocol))
        self._opened()
        try:
            async with aclosing(events):
                async for event in events:
                    yield event
        finally:
            self._closed()

    def begin_serving(self) -> None:
        """What is to be served is loaded and has proven itself: take requests."""
        self._health.phase = Phase.SERVING

    # --- how it ends ---

    def begin_drain(self) -> None:
        """Refuse new requests from here on; the open ones go on."""
        self._health.phase = Phase.DRAINING

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything open ended within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
                for model in self.repository.models():
                    await model.wait_idle()
        except TimeoutError:
            return False
        return True

    async def abort_all(self, error: SluiceError) -> None:
        """End everything open: streams of language models with `error`, which their clients see as an error event."""
        for engine in self.engines():
            engine.abort_all(error)
        models = self.repository.models()
        with suppress(TimeoutError):  # ensembles tell that error too, unless closed before it has reached them
            async with asyncio.timeout(_ABORTED_S):
                await asyncio.gather(*(model.wait_idle() for model in models if isinstance(model, LlmModel)))
        for model in models:
            if not isinstance(model, LlmModel):
                await model.close()

    async def close(self) -> None:
        """Unload everything and free what requests have shared. What is still open ends in an error."""
        await self.repository.close(0)
        self.shared_memory.close()
        self.trace.close()
        self.log_settings.close()
        for close in self._closes_last:
            await close()

    @property
    def num_open(self) -> int:
        """Requests that have begun and not ended."""
        return self._num_texts + sum(model.num_in_flight for model in self.repository.models())

    def _opened(self) -> None:
        self._num_texts += 1
        self._idle.clear()

    def _closed(self) -> None:
        self._num_texts -= 1
        if self._num_texts == 0:
            self._idle.set()
