"""When the steps of a request run: which are needed, what each waits for, its limit and its parameters."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial

from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.errors import invalid
from sluice.serving.backend import ModelLookup
from sluice.serving.backends.ensemble.graph import (
    EnsembleGraph,
    EnsembleStep,
    StreamPath,
    StreamPaths,
    find_stream_paths,
    is_within,
)
from sluice.serving.request import InferRequest, Parameters
from sluice.serving.spec import ModelSpec

_MAX_CACHED = 64
"""Bound on cached schedules, because clients choose the outputs that lead to them."""
_PREFIX = "step_parameters."
"""Prefix of `step_parameters.MODEL` in config.pbtxt: names, separated by commas, for that model alone."""


@dataclass(frozen=True, slots=True)
class StreamLevel:
    """A stream: the ensemble's `outputs` that complete a response, and tensors `inherited` from outer streams."""

    outputs: tuple[str, ...] = ()
    inherited: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnsembleSchedule:
    """Schedule of the requests that have the same outputs and the same streaming steps.

    `steps` are the needed ones. `awaits` has for each step index the tensors that must be available when the step
    begins: its inputs, and for a streaming step also tensors from outside its stream that steps or outputs within it
    need, and outputs that go out before it. `starts` has for each tensor the steps that it may be the last tensor for.
    `inner` has the level of each streaming step.
    """

    steps: tuple[EnsembleStep, ...]
    awaits: Mapping[int, tuple[str, ...]]
    starts: Mapping[str, tuple[EnsembleStep, ...]]
    outer: StreamLevel
    inner: Mapping[int, StreamLevel]

    @property
    def is_streaming(self) -> bool:
        """Whether a request may get any number of responses instead of one."""
        return bool(self.inner)

    def ready_steps(self, new: Iterable[str], available: Mapping[str, object]) -> list[EnsembleStep]:
        """Return the steps that the tensors in `new` complete, given all tensors that are `available`."""
        found = {step.index: step for name in new for step in self.starts.get(name, ())}
        return [found[index] for index in sorted(found) if all(name in available for name in self.awaits[index])]


def build_schedule(
    spec: ModelSpec, graph: EnsembleGraph, requested: frozenset[str], streaming: frozenset[int]
) -> EnsembleSchedule:
    """Build the schedule for the outputs `requested`; none stands for all. The graph must have been checked."""
    # In reverse order, as in Triton, for clients that take outputs by position.
    outputs = [name for name in reversed(spec.outputs) if not requested or name in requested]
    needed = graph.needed_for(outputs)
    streaming &= needed
    builder = _ScheduleBuilder(find_stream_paths(spec.name, spec.inputs, graph, streaming), outputs, graph, needed)
    awaits = {step.index: builder.awaited_tensors(step, step.index in streaming) for step in builder.steps}
    return EnsembleSchedule(
        steps=builder.steps,
        awaits=awaits,
        starts=builder.started_steps(awaits),
        outer=builder.level(()),
        inner={index: builder.level((*builder.paths.by_step[index], index)) for index in streaming},
    )


class _ScheduleBuilder:
    """Computes the parts of a schedule."""

    def __init__(self, paths: StreamPaths, outputs: list[str], graph: EnsembleGraph, needed: frozenset[int]) -> None:
        self.paths = paths
        self.steps = tuple(step for step in graph.steps if step.index in needed)
        self._outputs = outputs

    def level(self, stream: StreamPath) -> StreamLevel:
        by_tensor = self.paths.by_tensor
        outputs = tuple(name for name in self._outputs if by_tensor[name] == stream)
        return StreamLevel(outputs, tuple(self._inherited(stream)))

    def awaited_tensors(self, step: EnsembleStep, is_streaming: bool) -> tuple[str, ...]:
        names = dict.fromkeys(step.reads)
        if is_streaming:
            own = self.paths.by_step[step.index]
            names.update(dict.fromkeys(self._inherited((*own, step.index))))
            # Outputs that exist before the stream go out before its first response.
            names.update(dict.fromkeys(name for name in self._outputs if self.paths.by_tensor[name] == own))
        return tuple(names)

    def started_steps(self, awaits: Mapping[int, tuple[str, ...]]) -> dict[str, tuple[EnsembleStep, ...]]:
        """Return the steps each tensor may start: none outside its own stream, where it is there before the step."""
        by_step, by_tensor = self.paths.by_step, self.paths.by_tensor
        names = {name for needed in awaits.values() for name in needed}
        return {
            name: tuple(
                step for step in self.steps if name in awaits[step.index] and by_tensor[name] == by_step[step.index]
            )
            for name in names
        }

    def _inherited(self, stream: StreamPath) -> Iterator[str]:
        by_step, by_tensor = self.paths.by_step, self.paths.by_tensor
        inner = (step for step in self.steps if stream and is_within(by_step[step.index], stream))
        found = dict.fromkeys(name for step in inner for name in step.reads)
        return (name for name in found if not is_within(by_tensor[name], stream))


FindSchedule = Callable[[frozenset[str], frozenset[int]], EnsembleSchedule]
"""Returns what `build_schedule` builds for these outputs and streaming steps."""


def cache_schedules(spec: ModelSpec, graph: EnsembleGraph) -> FindSchedule:
    """Return a function that builds each schedule of an ensemble when it is first needed."""
    return lru_cache(_MAX_CACHED)(partial(build_schedule, spec, graph))


class StepLimit:
    """Limit on the requests in one step (`max_inflight_requests`); 0 is none. The others wait in order."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._num_in_flight = 0
        self._waiting: deque[Callable[[], bool]] = deque()

    def acquire(self, begin: Callable[[], bool]) -> None:
        """Call `begin` once the limit admits it. If it returns True it takes the place, and `release` must follow."""
        self._waiting.append(begin)
        self._admit()

    def release(self) -> None:
        """Give the place back, which may begin another request at once."""
        self._num_in_flight -= 1
        self._admit()

    def _admit(self) -> None:
        while self._waiting and (not self._limit or self._num_in_flight < self._limit):
            begin = self._waiting.popleft()
            self._num_in_flight += 1
            if not begin():
                self._num_in_flight -= 1


@dataclass(frozen=True, slots=True)
class StepParameters:
    """Chooses each step's request parameters, without those for other models alone: a name may mean two things."""

    owners: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """Models that a parameter is for, by parameter. One that is absent is for all."""

    def select(self, model: str, parameters: Parameters) -> Parameters:
        """Return a copy of the parameters, reduced to those for the steps of `model`."""
        owners = self.owners
        if not owners:
            return parameters.copy()
        return {name: value for name, value in parameters.items() if name not in owners or model in owners[name]}


def parse_step_parameters(config: ModelConfig) -> StepParameters:
    """Parse `step_parameters`. Raises INVALID for a model that no step names."""
    owners: dict[str, frozenset[str]] = {}
    models = {step.model_name for step in config.ensemble_scheduling.step}
    for key, value in config.parameters.items():
        if not key.startswith(_PREFIX):
            continue
        model = key.removeprefix(_PREFIX)
        if model not in models:
            raise invalid(key, f"parameter '{key}' of ensemble '{config.name}' is for '{model}', which no step calls")
        for name in filter(None, map(str.strip, value.string_value.split(","))):
            owners[name] = owners.get(name, frozenset()) | {model}
    return StepParameters(owners)


@dataclass(frozen=True, slots=True)
class EnsemblePlan:
    """Data that all requests to an ensemble share. `decoupled` has the indices of the steps of decoupled models."""

    spec: ModelSpec
    graph: EnsembleGraph
    decoupled: frozenset[int]
    limits: Sequence[StepLimit]
    models: ModelLookup
    find_schedule: FindSchedule
    parameters: StepParameters

    @property
    def is_batching(self) -> bool:
        return self.spec.max_batch_size > 0

    @property
    def has_overall_timeout(self) -> bool:
        """Whether a request's timeout covers all of it, as a language model's does.

        Otherwise it is Triton's: each step has it anew, for as long as it waits to be run.
        """
        return bool(self.decoupled)

    def schedule_for(self, request: InferRequest) -> EnsembleSchedule:
        """Return how `request` runs. Raises SluiceError where the model of a step that may stream is gone."""
        streaming = frozenset(index for index in self.decoupled if self._is_streaming(self.graph.steps[index], request))
        return self.find_schedule(frozenset(request.requested_outputs), streaming)

    def _is_streaming(self, step: EnsembleStep, request: InferRequest) -> bool:
        """Return whether a step of a decoupled model streams for `request`: an LLM only streams where it is asked to.

        The model sees as much of its request as is known before any step has run.
        """
        inputs = {
            name: request.inputs[tensor].renamed(name)
            for name, tensor in step.inputs.items()
            if tensor in request.inputs
        }
        model = self.models.find(step.model_name, step.version)
        rows = max((each.shape[0] for each in request.inputs.values() if each.shape), default=1)
        known = replace(
            request,
            inputs=inputs,
            requested_outputs=tuple(step.outputs),
            batch_size=rows if self.is_batching else 1,
        )
        return model.is_decoupled_for(known)
