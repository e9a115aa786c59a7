"""Which of an ensemble's tensors belong to which stream of responses.

Every decoupled step makes a stream: its responses, one after the other, and all that the steps after it make of each.
Streams nest as such steps follow each other. What is outside a stream is the same for all of its responses, so the
two can meet; nothing tells how the responses of two streams beside each other would pair.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from serving.backends.ensemble.graph import Graph
from sluice.errors import ErrorCode, SluiceError

Stream = tuple[int, ...]
"""The decoupled steps, by index and outermost first, that a tensor is a response of; () is the request's own."""


@dataclass(frozen=True, slots=True)
class Streams:
    """The stream in which each step runs, by its index, and to which each tensor belongs, by its name."""

    of_step: Mapping[int, Stream]
    of_tensor: Mapping[str, Stream]


def streams_of(ensemble: str, inputs: Iterable[str], graph: Graph, decoupled: frozenset[int]) -> Streams:
    """The streams of an ensemble whose steps `decoupled` answer with any number of responses.

    Raises SluiceError INVALID in Triton's words for a step whose inputs come from streams beside each other.
    """
    of_step: dict[int, Stream] = {}
    of_tensor: dict[str, Stream] = dict.fromkeys(inputs, ())
    waiting = list(graph.steps)
    while waiting:
        step = next((each for each in waiting if all(name in of_tensor for name in each.reads)), None)
        if step is None:
            raise _invalid(f"in ensemble {ensemble}, steps wait for tensors that nothing writes")
        waiting.remove(step)
        stream = innermost(ensemble, step.model_name, [of_tensor[name] for name in step.reads])
        of_step[step.index] = stream
        after = (*stream, step.index) if step.index in decoupled else stream
        of_tensor.update(dict.fromkeys(step.writes, after))
    return Streams(of_step, of_tensor)


def innermost(ensemble: str, reader: str, streams: Iterable[Stream]) -> Stream:
    """The stream within all others of `streams`. Raises SluiceError INVALID where two are beside each other."""
    found: Stream = ()
    for stream in sorted(streams, key=len):
        if not is_within(stream, found):
            raise _invalid(
                f"in ensemble {ensemble}, step of model '{reader}' receives inputs originated from different decoupled "
                "models"
            )
        found = stream
    return found


def is_within(stream: Stream, outer: Stream) -> bool:
    """Whether `stream` is `outer`, or what it leads to."""
    return stream[: len(outer)] == outer


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
