"""How the server is, for probes: where it is in its life, and whether what it serves with can serve."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from engine.client.base import EngineClient

_RETRY_LOADING_S = 1.0
_RETRY_ELSEWHERE_S = 5.0


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


_WELL = Health()


class ServerHealth:
    """Judges the server by its phase, its engines and its repository.

    While loading it is live and not ready. While a lost engine is replaced it is live and not ready: requests are taken
    and wait. When an engine is given up it is neither: whoever watches the probes restarts the server.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable["EngineClient"]],
        repository_problem: Callable[[], str],
        heartbeat_timeout_s: float,
    ) -> None:
        """`engines` are those of the loaded models; `repository_problem` says why the repository is not ready."""
        self.phase = Phase.LOADING
        self._engines = engines
        self._repository_problem = repository_problem
        self._heartbeat_timeout_s = heartbeat_timeout_s

    def liveness(self) -> Health:
        """Whether the engines move, or will: one that loads is not expected to, and one that hangs is replaced."""
        return self._first_problem(self._deadness)

    def readiness(self) -> Health:
        """Whether new requests would be served now."""
        if self.phase is Phase.LOADING:
            return Health("the model is loading")
        if self.phase is Phase.DRAINING:
            return Health("the server is shutting down")
        problem = self._first_problem(self._idleness)
        return Health(self._repository_problem()) if problem.is_ok else problem

    def refuse_unless_serving(self) -> None:
        """Raise UNAVAILABLE while loading and while shutting down."""
        if self.phase is Phase.LOADING:
            raise SluiceError(ErrorCode.UNAVAILABLE, "the model is loading", retry_after_s=_RETRY_LOADING_S)
        self.refuse_if_draining()

    def refuse_if_draining(self) -> None:
        if self.phase is Phase.DRAINING:
            message = "the server is shutting down"
            raise SluiceError(ErrorCode.UNAVAILABLE, message, retry_after_s=_RETRY_ELSEWHERE_S)

    def _first_problem(self, judge: Callable[["EngineClient"], Health]) -> Health:
        return next((health for health in map(judge, self._engines()) if not health.is_ok), _WELL)

    def _deadness(self, engine: "EngineClient") -> Health:
        if engine.failure is not None:
            return Health(f"the engine failed: {engine.failure}")
        return _WELL if engine.can_restart else self._silence(engine)

    def _idleness(self, engine: "EngineClient") -> Health:
        if engine.is_restarting:
            return Health("the engine is restarting")
        deadness = self._deadness(engine)
        return self._silence(engine) if deadness.is_ok else deadness

    def _silence(self, engine: "EngineClient") -> Health:
        age_s = engine.heartbeat_age_s()
        if age_s < self._heartbeat_timeout_s:
            return _WELL
        return Health(f"the engine has been silent for {age_s:.1f} s")
