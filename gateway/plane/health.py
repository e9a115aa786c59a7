"""The server's health, for probes: its phase of life, and whether its engines and its repository can serve."""

from collections.abc import Callable
from enum import Enum

from sluice.engine.fleet.client import Engine
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model import language_models
from sluice.serving.repository.repository import ModelRepository

_LOADING = "the server is loading its models"
_RETRY_LOADING_S = 1.0
_RETRY_ELSEWHERE_S = 5.0


class Phase(Enum):
    """The server's phase of life. It only moves forward."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


class ServerHealth:
    """Judges the server by its phase, its engines and its repository.

    While loading it is live and not ready; models that are ready serve already. While a lost engine is replaced, or
    one sleeps, it is live and not ready: requests are taken and wait. When an engine is given up it is neither, so that
    a supervisor restarts the server.
    """

    def __init__(
        self, repository: ModelRepository, heartbeat_timeout_s: float, *, is_strictly_ready: bool = True
    ) -> None:
        """Unless `is_strictly_ready`, a repository that is not ready leaves the server ready."""
        self.phase = Phase.LOADING
        self._repository = repository
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._is_strictly_ready = is_strictly_ready

    def begin_serving(self) -> None:
        """Be ready from here on: the models are loaded and tested."""
        self.phase = Phase.SERVING

    def begin_drain(self) -> None:
        """Refuse new requests from here on; open ones go on."""
        self.phase = Phase.DRAINING

    def is_live(self) -> bool:
        return not self.why_not_live()

    def is_ready(self) -> bool:
        return not self.why_not_ready()

    def why_not_live(self) -> str:
        """Return why the server should be replaced, "" where it should be left running: a loading engine need not
        speak, and a hanging one is replaced."""
        return self._first_problem(self._check_live)

    def why_not_ready(self) -> str:
        """Return why new requests would not be served now, "" where they would."""
        if self.phase is Phase.LOADING:
            return _LOADING
        if self.phase is Phase.DRAINING:
            return "the server is shutting down"
        problem = self._first_problem(self._check_ready)
        return problem or (self._repository.problem if self._is_strictly_ready else "")

    def explain_absence(self, name: str, error: SluiceError) -> SluiceError:
        """Return the error for a model that was not found: while the server is loading it may still come."""
        if self.phase is not Phase.LOADING:
            return error
        message = f"model '{name}' is not ready: {_LOADING}"
        return SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_LOADING_S)

    def refuse_if_draining(self) -> None:
        if self.phase is Phase.DRAINING:
            message = "the server is shutting down"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_ELSEWHERE_S)

    def _first_problem(self, judge: Callable[[Engine], str]) -> str:
        engines = [model.engine for model in language_models(self._repository.models())]
        return next(filter(None, map(judge, engines)), "")

    def _check_live(self, engine: Engine) -> str:
        if engine.failure is not None:
            return f"the engine failed: {engine.failure}"
        return "" if engine.can_restart else self._check_heartbeat(engine)

    def _check_ready(self, engine: Engine) -> str:
        if engine.is_restarting:
            return "the engine is restarting"
        if engine.is_sleeping:
            return "an engine sleeps; POST /wake_up"
        return self._check_live(engine) or self._check_heartbeat(engine)

    def _check_heartbeat(self, engine: Engine) -> str:
        age_s = engine.heartbeat_age_s()
        if age_s < self._heartbeat_timeout_s:
            return ""
        return f"the engine has been silent for {age_s:.1f} s"
