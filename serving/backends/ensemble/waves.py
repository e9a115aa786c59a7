"""The order of an ensemble's responses, where decoupled steps make many out of one."""

from collections.abc import Iterator
from dataclasses import dataclass

from serving.backends.ensemble.schedule import Level
from serving.backends.ensemble.sequences import SequenceMark
from serving.request import InferResponse
from serving.tensors.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Value:
    """An ensemble tensor. `tensor` None: an optional input that was not given, or an output that a step left out.

    `batch_size` is of the request that made it, 0 where its model does not batch. Inputs of the
    ensemble have no `sequence` of their own.
    """

    tensor: Tensor | None
    batch_size: int
    sequence: SequenceMark | None = None


class Wave:
    """The tensors that one response of a decoupled step leads to; the request's own ones are the first wave.

    A step that streams makes a wave of each of its responses, under the one that it runs in. A wave gives one
    response at most, before those of the waves under it.
    """

    __slots__ = ("children", "level", "next_child", "num_children", "num_running", "parent", "response", "values")

    def __init__(self, level: Level, parent: "Wave | None" = None) -> None:
        self.level = level
        self.parent = parent
        self.values: dict[str, Value] = {}
        if parent is not None:
            self.values = {name: parent.values[name] for name in level.inherited}
        self.num_running = 0
        """Steps that run in it."""
        self.response: InferResponse | None = None
        """Made, and waiting for its turn."""
        self.children: dict[int, Wave] = {}
        """Those whose turn is not over, by their number."""
        self.num_children = 0
        self.next_child = 0

    def add_child(self, level: Level) -> "Wave":
        child = self.children[self.num_children] = Wave(level, self)
        self.num_children += 1
        return child


class Turns:
    """Hands out the responses of waves in the order in which the decoupled steps gave what they are made of.

    Steps may overtake each other where a model has several instances; a stream of tokens must not. A wave's turn ends
    when nothing runs in it any more.
    """

    def __init__(self, first: Wave) -> None:
        self._at: Wave | None = first

    def due(self) -> Iterator[InferResponse]:
        """The responses whose turn it is, as far as it goes now."""
        while self._at is not None:
            wave = self._at
            if wave.response is not None:
                response, wave.response = wave.response, None
                yield response
            elif wave.children:
                self._at = wave.children[wave.next_child]
            elif wave.num_running:
                return
            else:
                self._at = wave.parent
                _leave(wave)


def _leave(wave: Wave) -> None:
    if wave.parent is not None:
        del wave.parent.children[wave.parent.next_child]
        wave.parent.next_child += 1
