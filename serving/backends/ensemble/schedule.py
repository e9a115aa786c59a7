"""What one kind of request runs: the steps for the outputs that it wants, and when each of them begins."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from serving.backends.ensemble.graph import Graph, Step
from serving.backends.ensemble.streams import Stream, Streams, is_within, streams_of
from serving.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class Level:
    """One stream. A response of it is complete with `outputs`, the ensemble's that belong to it.

    `inherited` are the tensors of the streams around it that steps within it read.
    """

    outputs: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Schedule:
    """How requests run that want the same outputs and have the same steps stream.

    `steps` are the needed ones. `awaits` are by a step's index the tensors that must be there when it begins: its
    inputs, and for one that streams also what lies outside of its stream and is wanted within or before it.
    `starts` are by tensor the steps that it may be the last one for. `inner` are the levels by the step that streams.
    """

    steps: tuple[Step, ...]
    awaits: Mapping[int, tuple[str, ...]]
    starts: Mapping[str, tuple[Step, ...]]
    outer: Level
    inner: Mapping[int, Level]

    @property
    def streams(self) -> bool:
        """Whether such a request may get other than one response."""
        return bool(self.inner)

    def ready(self, new: Iterable[str], there: Mapping[str, object]) -> list[Step]:
        """The steps that the tensors `new` were the last ones for, where all of `there` have come."""
        found = {step.index: step for name in new for step in self.starts.get(name, ())}
        return [found[index] for index in sorted(found) if all(name in there for name in self.awaits[index])]


def schedule_of(spec: ModelSpec, graph: Graph, wanted: tuple[str, ...], streaming: frozenset[int]) -> Schedule:
    """The schedule of requests for the outputs `wanted`, all where it is empty. The graph has been checked."""
    # Last one first, as Triton: who takes outputs by place, not by name, finds the same ones.
    outputs = [name for name in reversed(spec.outputs) if not wanted or name in wanted]
    needed = graph.needed_for(outputs)
    streaming &= needed
    makes = _Maker(streams_of(spec.name, spec.inputs, graph, streaming), outputs, graph, needed)
    awaits = {step.index: makes.awaited(step, step.index in streaming) for step in makes.steps}
    return Schedule(
        steps=makes.steps,
        awaits=awaits,
        starts=makes.starts(awaits),
        outer=makes.level(()),
        inner={index: makes.level((*makes.streams.of_step[index], index)) for index in streaming},
    )


class _Maker:
    """What a schedule is made of."""

    def __init__(self, streams: Streams, outputs: list[str], graph: Graph, needed: frozenset[int]) -> None:
        self.streams = streams
        self.steps = tuple(step for step in graph.steps if step.index in needed)
        self._outputs = outputs

    def level(self, stream: Stream) -> Level:
        of_tensor = self.streams.of_tensor
        outputs = tuple(name for name in self._outputs if of_tensor[name] == stream)
        return Level(outputs, tuple(self._inherited(stream)))

    def awaited(self, step: Step, is_streaming: bool) -> tuple[str, ...]:
        names = dict.fromkeys(step.reads)
        if is_streaming:
            own = self.streams.of_step[step.index]
            names.update(dict.fromkeys(self._inherited((*own, step.index))))
            # Outputs that exist before the stream go out before its first response.
            names.update(dict.fromkeys(name for name in self._outputs if self.streams.of_tensor[name] == own))
        return tuple(names)

    def starts(self, awaits: Mapping[int, tuple[str, ...]]) -> dict[str, tuple[Step, ...]]:
        """A tensor from outside of a step's stream is there whenever the step could begin, so it starts nothing."""
        of_step, of_tensor = self.streams.of_step, self.streams.of_tensor
        names = {name for needed in awaits.values() for name in needed}
        return {
            name: tuple(
                step for step in self.steps if name in awaits[step.index] and of_tensor[name] == of_step[step.index]
            )
            for name in names
        }

    def _inherited(self, stream: Stream) -> Iterator[str]:
        of_step, of_tensor = self.streams.of_step, self.streams.of_tensor
        inside = (step for step in self.steps if stream and is_within(of_step[step.index], stream))
        found = dict.fromkeys(name for step in inside for name in step.reads)
        return (name for name in found if not is_within(of_tensor[name], stream))


_MOST_KEPT = 64
"""Clients choose outputs, so the schedules that they lead to must be bounded."""


class Schedules:
    """An ensemble's schedules, each made when it is first needed."""

    def __init__(self, spec: ModelSpec, graph: Graph) -> None:
        self._spec = spec
        self._graph = graph
        self._made: dict[tuple[frozenset[str], frozenset[int]], Schedule] = {}

    def get(self, wanted: tuple[str, ...], streaming: frozenset[int]) -> Schedule:
        """As `schedule_of`."""
        key = (frozenset(wanted), streaming)
        found = self._made.get(key)
        if found is None:
            if len(self._made) >= _MOST_KEPT:
                self._made.clear()
            found = self._made[key] = schedule_of(self._spec, self._graph, wanted, streaming)
        return found
