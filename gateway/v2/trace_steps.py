"""The steps of a traced request: what an ensemble, or a Python model, asks other models. As in Triton, each has a trace
of its own, which names the one that it belongs to."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from sluice.spans import Span

_COMPUTE = ("compute_input", "compute_infer", "compute_output")


class StepTrace(NamedTuple):
    """The trace of one step: its number, that of the trace above it, its model, and when it passed which point."""

    number: int
    parent: int
    model_name: str
    model_version: int
    times: list[tuple[str, int]]

    def records(self) -> list[dict[str, object]]:
        """Return it as Triton's JSON has it."""
        head = {"id": self.number, "model_name": self.model_name, "model_version": self.model_version}
        times = [{"id": self.number, "timestamps": [{"name": name, "ns": at_ns}]} for name, at_ns in self.times]
        return [head | {"parent_id": self.parent}, *times]


def find_steps(job: Span, number: int, choose_number: Callable[[], int]) -> Iterator[StepTrace]:
    """Yield the steps within the span of a job, whose trace has `number`; those above others first."""
    numbers = {job.span_id: number}
    for span in job.recording.spans:  # in the order in which they have begun
        parent = _number_above(span, numbers)
        if parent and span.name == f"infer {span.attributes.get('sluice.model')}":
            numbers[span.span_id] = choose_number()
            name, version = str(span.attributes["sluice.model"]), int(str(span.attributes["sluice.model_version"]))
            yield StepTrace(numbers[span.span_id], parent, name, version, list(_find_times(span)))


def _number_above(span: Span, numbers: dict[int, int]) -> int:
    """Return the number of the innermost trace around a span; 0 for a span outside of the job."""
    above = span.parent
    while above is not None and above.span_id not in numbers:
        above = above.parent
    return 0 if above is None else numbers[above.span_id]


def _find_times(span: Span) -> Iterator[tuple[str, int]]:
    """Yield the points that a step has passed. Parts that took no time have no span."""
    parts = {each.name: each for each in span.recording.spans if each.parent is span}
    computing = [parts[name] for name in _COMPUTE if name in parts]
    yield "REQUEST_START", span.started_ns
    yield "QUEUE_START", parts["queue"].started_ns if "queue" in parts else span.started_ns
    if computing:
        yield "COMPUTE_START", computing[0].started_ns
        if (running := parts.get("compute_infer")) is not None:
            yield "COMPUTE_INPUT_END", running.started_ns
            yield "COMPUTE_OUTPUT_START", running.ended_ns
        yield "COMPUTE_END", computing[-1].ended_ns
    if span.ended_ns:
        yield "REQUEST_END", span.ended_ns
