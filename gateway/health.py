"""The server's health, for probes: its phase of life, and whether its engines and its repository can serve."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from sluice.errors import ErrorCode, SluiceError

if TYPE_CHECKING:
    from sluice.engine.client.interface import Engine

_LOADING = "the server is loading its models"
_RETRY_LOADING_S = 1.0
_RETRY_ELSEWHERE_S = 5.0


class Phase(Enum):
    """The server's phase of life. It only moves forward."""

    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The answer to a probe. `reason` says what is wrong, and is empty where nothing is."""

    reason: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.reason


_HEALTHY = ProbeResult()


class ServerHealth:
    """Judges the server by its phase, its engines and its repository.

    While loading it is live and not ready; models that are ready serve already. While a lost engine is replaced, or
    one sleeps, it is live and not ready: requests are taken and wait. When an engine is given up it is neither, so that
    a supervisor restarts the server.
    """

    def __init__(
        self,
        engines: Callable[[], Iterable["Engine"]],
        repository_problem: Callable[[], str],
        heartbeat_timeout_s: float,
    ) -> None:
        """`engines` returns those of the loaded models, `repository_problem` why the repository is not ready."""
        self.phase = Phase.LOADING
        self._engines = engines
        self._repository_problem = repository_problem
        self._heartbeat_timeout_s = heartbeat_timeout_s

    def liveness(self) -> ProbeResult:
        """Whether the server should be left running: a loading engine need not speak, and a hanging one is replaced."""
        return self._first_problem(self._check_live)

    def readiness(self) -> ProbeResult:
        """Whether new requests would be served now."""
        if self.phase is Phase.LOADING:
            return ProbeResult(_LOADING)
        if self.phase is Phase.DRAINING:
            return ProbeResult("the server is shutting down")
        problem = self._first_problem(self._check_ready)
        return ProbeResult(self._repository_problem()) if problem.is_ok else problem

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

    def _first_problem(self, judge: Callable[["Engine"], ProbeResult]) -> ProbeResult:
        return next((health for health in map(judge, self._engines()) if not health.is_ok), _HEALTHY)

    def _check_live(self, engine: "Engine") -> ProbeResult:
        if engine.failure is not None:
            return ProbeResult(f"the engine failed: {engine.failure}")
        return _HEALTHY if engine.can_restart else self._check_heartbeat(engine)

    def _check_ready(self, engine: "Engine") -> ProbeResult:
        if engine.is_restarting:
            return ProbeResult("the engine is restarting")
        if engine.sleeping.is_sleeping:
            return ProbeResult("an engine sleeps; POST /wake_up")
        liveness = self._check_live(engine)
        return self._check_heartbeat(engine) if liveness.is_ok else liveness

    def _check_heartbeat(self, engine: "Engine") -> ProbeResult:
        age_s = engine.heartbeat_age_s()
        if age_s < self._heartbeat_timeout_s:
            return _HEALTHY
        return ProbeResult(f"the engine has been silent for {age_s:.1f} s")
