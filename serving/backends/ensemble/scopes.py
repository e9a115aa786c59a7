"""Tensors of a request to an ensemble, and the order of its responses where decoupled steps multiply them."""

from collections.abc import Iterator
from dataclasses import dataclass

from sluice.errors import invalid_argument
from sluice.serving.backends.ensemble.schedule import StreamLevel
from sluice.serving.request import InferRequest, InferResponse, Parameters, SequenceFlag
from sluice.serving.tensors.tensor import Tensor

SequencePosition = tuple[int | str, SequenceFlag]
"""Correlation id, and the request's position in its sequence."""
_NAMES = {"sequence_id", "sequence_start", "sequence_end"}


@dataclass(frozen=True, slots=True)
class TensorValue:
    """Value of an ensemble tensor.

    `tensor` is None for an optional input that is absent, or an output that a step left out. `batch_size` is that of
    the request that made it, 0 where its model does not batch. Inputs of the ensemble have no `sequence` of their own.
    """

    tensor: Tensor | None
    batch_size: int
    sequence: SequencePosition | None = None


class TensorScope:
    """Tensors that derive from one response of a decoupled step; the outermost scope has the request's own.

    A streaming step opens a scope for each of its responses, nested in the scope that it runs in. A scope gives at most
    one response, before those of its nested scopes.
    """

    __slots__ = ("children", "level", "next_child", "num_children", "num_running", "parent", "response", "values")

    def __init__(self, level: StreamLevel, parent: "TensorScope | None" = None) -> None:
        self.level = level
        self.parent = parent
        self.values: dict[str, TensorValue] = {}
        if parent is not None:
            self.values = {name: parent.values[name] for name in level.inherited}
        self.num_running = 0
        """Steps that run in the scope."""
        self.response: InferResponse | None = None
        """Response that is complete and waits for its turn."""
        self.children: dict[int, TensorScope] = {}
        """Nested scopes whose turn is not over, by number."""
        self.num_children = 0
        self.next_child = 0

    def add_child(self, level: StreamLevel) -> "TensorScope":
        child = self.children[self.num_children] = TensorScope(level, self)
        self.num_children += 1
        return child


class ResponseSequencer:
    """Gives out the responses of scopes in the order of the decoupled steps' responses that opened the scopes.

    Steps may overtake each other where a model has several instances; a stream of tokens must not. The turn of a scope
    ends when nothing runs in it any more.
    """

    def __init__(self, first: TensorScope) -> None:
        self._current: TensorScope | None = first

    def due_responses(self) -> Iterator[InferResponse]:
        """Yield the responses that are due now."""
        while self._current is not None:
            scope = self._current
            if scope.response is not None:
                response, scope.response = scope.response, None
                yield response
            elif scope.children:
                self._current = scope.children[scope.next_child]
            elif scope.num_running:
                return
            else:
                self._current = scope.parent
                _end_turn(scope)


def _end_turn(scope: TensorScope) -> None:
    if scope.parent is not None:
        del scope.parent.children[scope.parent.next_child]
        scope.parent.next_child += 1


def request_sequence(request: InferRequest) -> SequencePosition:
    return request.correlation_id, request.sequence


def response_sequence(response: InferResponse, own: SequencePosition) -> SequencePosition:
    """Return the position that a step's response gives, else `own`, the request's. Raises INVALID for wrong types."""
    given = response.parameters
    if not given.keys() & _NAMES:
        return own
    correlation_id = given.get("sequence_id", own[0])
    if isinstance(correlation_id, bool | float):
        message = "expected parameter 'sequence_id' to be TRITONSERVER_PARAMETER_INT or TRITONSERVER_PARAMETER_STRING"
        raise invalid_argument(message)
    flags = SequenceFlag.NONE
    if _is_set(given, "sequence_start"):
        flags |= SequenceFlag.START
    if _is_set(given, "sequence_end"):
        flags |= SequenceFlag.END
    return correlation_id, flags


def sequence_parameters(sequence: SequencePosition) -> Parameters:
    """Return a sequence position as parameters of the ensemble's response."""
    correlation_id, flags = sequence
    return {
        "sequence_id": correlation_id,
        "sequence_start": SequenceFlag.START in flags,
        "sequence_end": SequenceFlag.END in flags,
    }


def _is_set(parameters: Parameters, name: str) -> bool:
    value = parameters.get(name, False)
    if not isinstance(value, bool):
        raise invalid_argument(f"expect parameter '{name}' to be TRITONSERVER_PARAMETER_BOOL")
    return value
