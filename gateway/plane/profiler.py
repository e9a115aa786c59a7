"""Profiles: engine steps, tasks of the event loop and requests, as Chrome's and Perfetto's trace events.

The format is the JSON of `chrome://tracing` and ui.perfetto.dev: times in microseconds, a process for the gateway and
one for each engine, nested slices (`X`), counters (`C`) and nestable async slices (`b`, `e`) for requests.
"""

import asyncio
import logging
from collections.abc import Coroutine, Generator, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

from sluice.engine.client.base import EngineClient
from sluice.engine.frames import ProfiledStep
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model import language_models
from sluice.record.spans import Recording, Span, TimelineRing
from sluice.serving.repository.repository import ModelRepository

log = logging.getLogger(__name__)

Event = dict[str, Any]
_GATEWAY, _STEPS = 1, 1
"""Numbers of the gateway's process, and of an engine's loop."""
_US = 1_000_000
_NS_PER_US = 1000
_TICK_S = 0.005
MAX_SLICES = 200_000
"""Most steps of tasks in a profile. Those after them are left out, and counted."""


class Profiler:
    """Records one profile at a time. Belongs to the event loop; costs nothing while nobody asks."""

    def __init__(self, repository: ModelRepository, timelines: TimelineRing | None) -> None:
        """`timelines` None: profiles have no requests."""
        self._repository = repository
        self._timelines = timelines
        self._is_recording = False

    async def record(self, seconds: float) -> dict[str, Any]:
        """Record for `seconds`, and return the file's content. Raises OVERLOADED while another profile is recorded."""
        if self._is_recording:
            message = "a profile of this server is being recorded; try again when it is done"
            raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=seconds)
        self._is_recording = True
        try:
            return await self._record(seconds)
        finally:
            self._is_recording = False

    async def _record(self, seconds: float) -> dict[str, Any]:
        loop, began = LoopProfile(), perf_counter()
        engines = self._engines()
        tasks = [asyncio.create_task(_record_steps(name, each, seconds)) for name, each in engines.items()]
        loop.start()
        try:
            await asyncio.sleep(seconds)
        finally:
            loop.stop()
        try:
            steps = await asyncio.gather(*tasks)
        finally:
            for each in tasks:
                each.cancel()
        recordings = [] if self._timelines is None else self._timelines.recordings()
        seen = [each for each in recordings if not each.root.ended_ns or each.root.ended_ns / 1e9 >= began]
        return await asyncio.to_thread(build_profile, loop, dict(zip(engines, steps, strict=True)), seen, began)

    def _engines(self) -> dict[str, EngineClient]:
        return {
            f"{model.name} {model.version} {each.name}".rstrip(): each.engine
            for model in language_models(self._repository.models())
            for each in model.engine.replicas
        }


async def _record_steps(name: str, engine: EngineClient, seconds: float) -> list[ProfiledStep]:
    """Return an engine's steps; none, with a line in the log, of one that is lost."""
    try:
        return await engine.record_steps(seconds)
    except SluiceError as error:
        log.warning("the profile has no steps of engine %s: %s", name, error.message)
        return []


# -- the event loop


class TaskSlice(NamedTuple):
    """A step of a task: from one wait to the next."""

    task: str
    started: float
    seconds: float


class LoopProfile:
    """Records tasks that begin while it is open. Older tasks and callbacks show in how late the loop is."""

    def __init__(self) -> None:
        self.slices: list[TaskSlice] = []
        self.lags: list[tuple[float, float]] = []
        """When the loop was looked at, and how late it was, in seconds."""
        self.num_dropped = 0
        self._before: Any = None
        self._ticking: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, on the running event loop."""
        loop = asyncio.get_running_loop()
        self._before = loop.get_task_factory()
        self._ticking = loop.create_task(self._tick(), name="profile")
        loop.set_task_factory(self._make_task)

    def stop(self) -> None:
        """End. Tasks that were begun meanwhile go on, and are no longer recorded."""
        asyncio.get_running_loop().set_task_factory(self._before)
        if self._ticking is not None:
            self._ticking.cancel()

    def add(self, task: str, started: float) -> None:
        """Add a step that has just ended."""
        if len(self.slices) < MAX_SLICES:
            self.slices.append(TaskSlice(task, started, perf_counter() - started))
        else:
            self.num_dropped += 1

    def _make_task(self, loop: asyncio.AbstractEventLoop, coro: Any, **settings: Any) -> "asyncio.Task[Any]":
        return asyncio.Task(_TimedCoroutine(coro, self), loop=loop, **settings)

    async def _tick(self) -> None:
        while True:
            due = perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            now = perf_counter()
            self.lags.append((now, max(0.0, now - due)))


class _TimedCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine whose steps are recorded."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], profile: LoopProfile) -> None:
        self._coroutine = coroutine
        self._profile = profile
        self._name = getattr(coroutine, "__qualname__", type(coroutine).__name__)

    def send(self, value: Any) -> Any:
        started = perf_counter()
        try:
            return self._coroutine.send(value)
        finally:
            self._profile.add(self._name, started)

    def throw(self, *error: Any) -> Any:
        started = perf_counter()
        try:
            return self._coroutine.throw(*error)
        finally:
            self._profile.add(self._name, started)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._coroutine.__await__()


# -- the file


def build_profile(
    loop: LoopProfile, engines: Mapping[str, Sequence[ProfiledStep]], recordings: Sequence[Recording], began: float
) -> dict[str, Any]:
    """Return the file of a profile that began at `began`, of perf_counter, as all times here."""
    events = [*_loop_events(loop, began)]
    for number, (name, steps) in enumerate(engines.items(), _GATEWAY + 1):
        events += _engine_events(number, name, steps, began)
    for recording in recordings:
        events += _request_events(recording, began)
    other = {"product": "sluice", "dropped_task_steps": loop.num_dropped}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}


def _names(pid: int, process: str, thread: str) -> Iterator[Event]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    yield {"ph": "M", "pid": pid, "tid": _STEPS, "name": "thread_name", "args": {"name": thread}}


def _slice(pid: int, name: str, ts: float, dur: float, category: str, args: Mapping[str, Any]) -> Event:
    dur_us = max(0.0, round(dur * _US, 3))
    return {"ph": "X", "pid": pid, "tid": 1, "name": name, "cat": category, "ts": ts, "dur": dur_us, "args": {**args}}


def _counter(pid: int, name: str, ts: float, **values: float) -> Event:
    return {"ph": "C", "pid": pid, "tid": 0, "name": name, "ts": ts, "args": values}


def _loop_events(loop: LoopProfile, began: float) -> Iterator[Event]:
    yield from _names(_GATEWAY, "gateway", "event loop")
    for task, started, seconds in loop.slices:
        yield _slice(_GATEWAY, task, _ts(started, began), seconds, "task", {})
    for at, lag in loop.lags:
        yield _counter(_GATEWAY, "event loop lag", _ts(at, began), ms=round(lag * 1000, 3))


def _engine_events(pid: int, name: str, steps: Sequence[ProfiledStep], began: float) -> Iterator[Event]:
    yield from _names(pid, f"engine {name}", "steps")
    for step in steps:
        ts = _ts(step.started, began)
        args = {
            "decode": step.num_decode,
            "prefill_seqs": step.num_prefill_seqs,
            "prefill_tokens": step.num_prefill_tokens,
            "admitted": step.num_admitted,
            "preempted": step.num_preempted,
        }
        yield _slice(pid, "step", ts, sum(seconds for _, seconds in step.parts), "step", args)
        at = step.started
        for part, seconds in step.parts:
            yield _slice(pid, part, _ts(at, began), seconds, "part", {})
            at += seconds
        yield _counter(pid, "sequences", ts, running=step.num_running, waiting=step.num_waiting)


def _request_events(recording: Recording, began: float) -> Iterator[Event]:
    """Yield the spans that are over, each around those within it: one async track for a request."""
    yield from _span_events(recording.root, recording, began)


def _span_events(span: Span, recording: Recording, began: float) -> Iterator[Event]:
    if not span.ended_ns:
        return
    fixed = {"cat": "request", "id": recording.request_id, "pid": _GATEWAY, "tid": 0, "name": span.name}
    yield {"ph": "b", **fixed, "ts": _ts(span.started_ns / 1e9, began), "args": {**span.attributes}}
    for each in recording.spans:
        if each.parent is span:
            yield from _span_events(each, recording, began)
    yield {"ph": "e", **fixed, "ts": _ts(span.ended_ns / 1e9, began)}


def _ts(at: float, began: float) -> float:
    """Return microseconds since the profile began; what began before it is at 0 or after."""
    return max(0.0, round((at - began) * _US, 3))
