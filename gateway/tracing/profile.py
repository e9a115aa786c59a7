"""Profiles: engine steps, tasks of the event loop and requests, as Chrome's and Perfetto's trace events.

The format is the JSON of `chrome://tracing` and ui.perfetto.dev: times in microseconds, a process for the gateway and
one for each engine, nested slices (`X`), counters (`C`) and nestable async slices (`b`, `e`) for requests.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sluice.engine.frames import ProfiledStep
from sluice.gateway.tracing.loop_profile import LoopProfile
from sluice.record.spans import Recording, Span

Event = dict[str, Any]
_GATEWAY, _LOOP, _STEPS = 1, 1, 1
"""Numbers of the gateway's process, of its event loop, and of an engine's loop."""
_US = 1_000_000
_NS_PER_US = 1000


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
