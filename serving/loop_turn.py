"""Work of models on the event loop's own thread: how much there may be, and the watch over what takes too long."""

import asyncio
import threading
from abc import ABC, abstractmethod
from time import perf_counter

TURN_NS = 3_000_000
"""Longest time that runs hold the loop between two looks at its connections. Further ones go to their threads."""
STOPPED_AFTER_S = 0.02
"""Time after which a run that holds the loop is stopped."""
_LOOK_S = 0.005
_IDLE_S = 1.0
"""Time without a run on the loop after which nobody watches for them."""


class StoppableRun(ABC):
    """A run that another thread can end early."""

    is_stopped: bool = False

    @abstractmethod
    def stop(self) -> None:
        """End the run early where the library can; the run then raises or returns. Thread-safe; idempotent."""


class LoopTurn:
    """How long runs have held an event loop in its present turn, and the watch over the one that does now."""

    def __init__(self) -> None:
        self._spent_ns = 0
        self._is_renewing = False
        self._run: StoppableRun | None = None
        self._began_s = 0.0
        self._watcher: threading.Thread | None = None
        self._lock = threading.Lock()

    @property
    def has_time(self) -> bool:
        """Whether the loop may do another run in this turn."""
        return self._spent_ns < TURN_NS

    def begin(self, run: StoppableRun) -> None:
        """Note that `run` holds the loop from now on."""
        with self._lock:
            self._began_s = perf_counter()
            self._run = run
            if self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, name="loop-watch", daemon=True)
                self._watcher.start()

    def end(self) -> int:
        """Note that the run has ended. Returns how long it has held the loop, in nanoseconds."""
        self._run = None
        spent_ns = int((perf_counter() - self._began_s) * 1e9)
        self._spent_ns += spent_ns
        if not self._is_renewing:
            self._is_renewing = True
            asyncio.get_running_loop().call_soon(self._renew)
        return spent_ns

    def _renew(self) -> None:
        self._is_renewing = False
        self._spent_ns = 0

    def _watch(self) -> None:
        """Stop runs that hold the loop for too long. Ends by itself where there were none for a while."""
        pause = threading.Event()
        while not pause.wait(_LOOK_S):
            with self._lock:
                run, age_s = self._run, perf_counter() - self._began_s
                if run is None and age_s > _IDLE_S:
                    self._watcher = None
                    return
                if run is not None and age_s > STOPPED_AFTER_S and not run.is_stopped:
                    run.stop()
