"""Which runs the event loop does itself, and that those which hold it are stopped and done by the thread."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from sluice.serving import loop_turn
from sluice.serving.backends.arrays.instance import HELD_NS, SHORT_NS, RunTimes
from sluice.serving.loop_turn import TURN_NS, LoopTurn, StoppableRun
from sluice.serving.model import Model, infer_one
from sluice.serving.tensors.tensor import Array
from tests.serving.backends.builders import infer, request
from tests.serving.backends.onnxruntime import parts

SHORT, LONG = 1, 400_000
"""Rounds of a loop that take no time, and about half a second."""


class RecordedTurn(LoopTurn):
    """Records the runs that the event loop began."""

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[StoppableRun] = []

    def begin(self, run: StoppableRun) -> None:
        self.runs.append(run)
        super().begin(run)


def counting() -> onnx.ModelProto:
    """`y` counts up to `x`: how long that takes is not known from any shape."""
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["going_on"], ["goes_on"]),
            helper.make_node("Add", ["before", "one"], ["after"]),
        ],
        "round",
        [
            parts.value("round", [], TensorProto.INT64),
            parts.value("going_on", [], TensorProto.BOOL),
            parts.value("before", [1], TensorProto.INT64),
        ],
        [parts.value("goes_on", [], TensorProto.BOOL), parts.value("after", [1], TensorProto.INT64)],
    )
    initializers = [
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
        helper.make_tensor("zero", TensorProto.INT64, [1], [0]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
        helper.make_tensor("axis", TensorProto.INT64, [1], [0]),
    ]
    nodes = [
        helper.make_node("Squeeze", ["x", "axis"], ["rounds"]),
        helper.make_node("Loop", ["rounds", "yes", "zero"], ["y"], body=body),
    ]
    dims = [1]
    return parts.graph(
        nodes, [parts.value("x", dims, parts.INT64)], [parts.value("y", dims, parts.INT64)], initializers
    )


async def load(folder: Path, more: str = "") -> tuple[Model, RecordedTurn]:
    turn = RecordedTurn()
    return await parts.load(folder, counting(), more, replace(parts.context(), loop_turn=turn)), turn


async def count(model: Model, rounds: int) -> int:
    return int((await infer(model, request(x=np.array([rounds], np.int64))))["y"][0])


async def count_until_inline(model: Model, turn: RecordedTurn) -> None:
    """Run until the loop does one more run itself: after long runs on a busy machine, many short ones are needed."""
    before = len(turn.runs)
    for _ in range(2000):
        assert await count(model, SHORT) == SHORT
        if len(turn.runs) > before:
            return
    raise AssertionError("no run was short enough")


async def test_the_loop_does_short_runs_itself_once_it_knows_them(tmp_path: Path) -> None:
    model, turn = await load(tmp_path)
    await count_until_inline(model, turn)
    assert model.statistics.infer.success.count == model.statistics.execution_count
    assert model.statistics.infer.fail.count == 0
    await model.close()


async def test_a_run_that_holds_the_loop_is_stopped_and_done_by_the_thread(tmp_path: Path) -> None:
    model, turn = await load(tmp_path)
    for _ in range(20):
        await count_until_inline(model, turn)
        assert await count(model, LONG) == LONG
        if turn.runs[-1].is_stopped:
            break
    assert turn.runs[-1].is_stopped
    num_begun = len(turn.runs)
    assert await count(model, LONG) == LONG
    assert len(turn.runs) == num_begun  # the next is begun on the thread
    await model.close()


async def test_failures_are_told_alike(tmp_path: Path) -> None:
    """An error that the library raises on the loop is the request's, and leaves the instance as it was."""
    reshaped = parts.graph(
        [helper.make_node("Reshape", ["x", "shape"], ["y"])],
        [parts.value("x", ["n"]), parts.value("shape", [1], parts.INT64)],
        [parts.value("y", ["m"])],
    )
    turn = RecordedTurn()
    model = await parts.load(tmp_path, reshaped, "", replace(parts.context(), loop_turn=turn))
    good: dict[str, Array] = {"x": np.ones(2, np.float32), "shape": np.array([2], np.int64)}
    bad: dict[str, Array] = {"x": np.ones(2, np.float32), "shape": np.array([3], np.int64)}
    first = await infer_one(model, request(**good))
    messages = set()
    for _ in range(2000):
        with pytest.raises(Exception, match="onnx runtime error") as raised:
            await infer_one(model, request(**bad))
        messages.add(str(raised.value))
        if turn.runs:
            break
    assert turn.runs
    assert len(messages) == 1
    assert (await infer_one(model, request(**good))).outputs[0].shape == first.outputs[0].shape
    await model.close()


async def test_sequences_and_bound_instances_keep_their_thread(tmp_path: Path) -> None:
    model, turn = await load(tmp_path, "sequence_batching { } ")
    for number in range(30):
        sent = request(x=np.array([SHORT], np.int64))
        sent.correlation_id = number + 1
        sent.sequence |= 3
        await infer_one(model, sent)
    assert not turn.runs
    await model.close()


def test_times_are_learned_by_size() -> None:
    times = RunTimes()
    for _ in range(8):
        assert not times.are_short(100)
        times.note_thread(100, 1000, 2000)
    assert times.are_short(100)
    assert times.are_short(127)
    assert not times.are_short(128)
    times.note_loop(100, 1000, 10 * SHORT_NS)  # other processes had the processor
    assert times.are_short(100)
    times.note_loop(100, 10 * SHORT_NS, 10 * SHORT_NS)
    assert not times.are_short(100)
    for _ in range(30):
        times.note_thread(100, 1000, 2000)
    assert times.are_short(100)


def test_a_run_that_held_the_loop_is_long_whatever_it_computed() -> None:
    times = RunTimes()
    for _ in range(8):
        times.note_thread(100, 1000, 2000)
    times.note_loop(100, 1000, HELD_NS)
    assert not times.are_short(100)


def test_what_waits_on_its_thread_is_not_short() -> None:
    times = RunTimes()
    for _ in range(20):
        times.note_thread(100, 1000, 10 * SHORT_NS)
    assert not times.are_short(100)


async def test_a_turn_has_room_for_so_much(monkeypatch: pytest.MonkeyPatch) -> None:
    others = watchers()
    turn, now = LoopTurn(), [0.0]
    monkeypatch.setattr(loop_turn, "perf_counter", lambda: now[0])
    run = Stopped()
    for _ in range(2):
        assert turn.has_time
        turn.begin(run)
        now[0] += TURN_NS / 1e9
        assert turn.end() == pytest.approx(TURN_NS, rel=0.01)
        assert not turn.has_time
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    now[0] += 100.0
    for thread in watchers() - others:
        await asyncio.to_thread(thread.join, 10.0)
        assert not thread.is_alive()


def watchers() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "loop-watch"}


class Stopped(StoppableRun):
    """A run that was stopped before it began."""

    is_stopped = True

    def stop(self) -> None:
        raise AssertionError("it has been stopped")
