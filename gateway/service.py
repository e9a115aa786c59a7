"""The one data plane under every protocol: finds the model, streams from it, and knows what is open."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from engine.errors import ErrorCode, SluiceError
from engine.types import FinishReason
from gateway.telemetry.metrics import GatewayMetrics
from pipelines.text.types import SamplingOverrides, TextEvent, TextRequest

if TYPE_CHECKING:  # both are heavy to import, and the server listens before they are
    from engine.client.base import EngineClient
    from pipelines.backends.llm.text import LlmText

_RETRY_LOADING_S = 1.0
_RETRY_ELSEWHERE_S = 5.0
_BROKEN_OFF = (FinishReason.CANCELLED, FinishReason.ERROR)
"""Reasons that the engine, not the client, ended a request for: the client must see no clean end."""


class Phase(Enum):
    """Where the server is in its life. It only moves forward."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Health:
    """An answer to a probe. `reason` says why not, and is empty where all is well."""

    reason: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.reason


class InferenceService:
    """Serves the models of one engine. Lives on the event loop's thread.

    While loading it is live and not ready; `begin_serving` makes it ready. Once draining it refuses
    what is new, and what is open goes on until it ends or `abort_all` ends it. While a lost engine is
    replaced it is live and not ready: requests are taken and wait. When the engine is given up it is neither,
    and every request is refused as unavailable: whoever watches the probes restarts the server.
    """

    def __init__(self, engine: "EngineClient", metrics: GatewayMetrics, heartbeat_timeout_s: float) -> None:
        self.metrics = metrics
        self._engine = engine
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._phase = Phase.LOADING
        self._models: dict[str, LlmText] = {}
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    # --- what there is ---

    def model(self, name: str) -> "LlmText":
        """The model called `name`, ready to generate. Raises NOT_FOUND, and UNAVAILABLE while it cannot serve."""
        self._refuse_unless_serving()
        model = self._models.get(name)
        if model is None:
            available = ", ".join(self._models)
            raise SluiceError(ErrorCode.NOT_FOUND, f"model {name!r} not found; available: {available}", param="model")
        return model

    def models(self) -> list["LlmText"]:
        """Every loaded model; none while loading."""
        return list(self._models.values())

    # --- how it is ---

    def liveness(self) -> Health:
        """Whether the engine moves, or will: one that loads is not expected to, and one that hangs is replaced."""
        if self._engine.failure is not None:
            return Health(f"the engine failed: {self._engine.failure}")
        if self._phase is Phase.LOADING or self._engine.can_restart:
            return Health()
        return self._silence()

    def readiness(self) -> Health:
        """Whether a new request would be served now."""
        if self._phase is Phase.LOADING:
            return Health("the model is loading")
        if self._phase is Phase.DRAINING:
            return Health("the server is shutting down")
        if self._engine.is_restarting:
            return Health("the engine is restarting")
        liveness = self.liveness()
        return self._silence() if liveness.is_ok else liveness

    def _silence(self) -> Health:
        age_s = self._engine.heartbeat_age_s()
        if age_s < self._heartbeat_timeout_s:
            return Health()
        return Health(f"the engine has been silent for {age_s:.1f} s")

    def is_live(self) -> bool:
        return self.liveness().is_ok

    def is_ready(self) -> bool:
        return self.readiness().is_ok

    # --- what it does ---

    async def generate(self, model: "LlmText", request: TextRequest, protocol: str) -> AsyncGenerator[TextEvent, None]:
        """Streams the answer to `request`; `protocol` is its label in the metrics.

        Every refusal (INVALID, OVERLOADED, UNAVAILABLE) is raised, as SluiceError, before the first
        event. Who stops early closes the stream, which cancels the request in the engine.
        """
        self._refuse_if_draining()
        record = self.metrics.open_request(model.name, protocol)
        self._opened()
        try:
            async with aclosing(model.generate(request)) as events:
                async for event in events:
                    if event.finish_reason in _BROKEN_OFF:
                        raise SluiceError(ErrorCode.UNAVAILABLE, "the engine ended the request before it was complete")
                    record.observe(event)
                    yield event
        except Exception as error:
            record.fail(error)
            raise
        finally:
            record.close()
            self._closed()

    async def warm_up(self, model: "LlmText") -> None:
        """Generate one token as for a client, outside the metrics. Raises what a client would see."""
        request = TextRequest(request_id="warm-up", prompt="Hello", sampling=SamplingOverrides(max_tokens=1))
        async with aclosing(model.generate(request)) as events:
            num_tokens = sum([event.num_tokens async for event in events])
        if num_tokens == 0:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the model generated nothing when it was tried")

    def begin_serving(self, model: "LlmText") -> None:
        """The model has proven itself: take requests for it."""
        self._models[model.name] = model
        self._phase = Phase.SERVING

    # --- how it ends ---

    def begin_drain(self) -> None:
        """Refuse new requests from here on; the open ones go on."""
        self._phase = Phase.DRAINING

    async def wait_idle(self, timeout_s: float) -> bool:
        """Whether every open stream ended within `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    def abort_all(self, error: SluiceError) -> None:
        """End every open stream with `error`, which its client sees as an error event."""
        self._engine.abort_all(error)

    @property
    def num_open(self) -> int:
        """Streams that have begun and not ended."""
        return self._num_open

    def _opened(self) -> None:
        self._num_open += 1
        self._idle.clear()

    def _closed(self) -> None:
        self._num_open -= 1
        if self._num_open == 0:
            self._idle.set()

    def _refuse_unless_serving(self) -> None:
        if self._phase is Phase.LOADING:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the model is loading", retry_after_s=_RETRY_LOADING_S)
        self._refuse_if_draining()
        if self._engine.failure is not None:
            raise SluiceError(ErrorCode.UNAVAILABLE, f"the engine failed: {self._engine.failure}")

    def _refuse_if_draining(self) -> None:
        if self._phase is Phase.DRAINING:
            message = "the server is shutting down"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_ELSEWHERE_S)
