"""Tensors that the batcher keeps for a sequence from one request to the next (`state`): clients never see them."""

from collections.abc import Mapping

from serving.request import InferRequest
from serving.spec import ModelSpec
from serving.tensors.tensor import Tensor


class StateTensors:
    """Which of a model's inputs and outputs are states, and what they begin as."""

    def __init__(self, spec: ModelSpec, initial: Mapping[str, Tensor]) -> None:
        """`initial` by input name."""
        self.initial = dict(initial)
        self._input_of = {state.output_name: state.input_name for state in spec.states}
        self._outputs = tuple(spec.outputs)

    @property
    def are_any(self) -> bool:
        return bool(self._input_of)

    def ask(self, request: InferRequest) -> frozenset[str]:
        """Ask for every state's output too. Returns those that are not for the client, who may have asked for some."""
        visible = request.requested_outputs or self._outputs
        hidden = [name for name in self._input_of if name not in visible]
        request.requested_outputs = (*visible, *hidden)
        return frozenset(hidden)

    def taken(self, outputs: list[Tensor]) -> dict[str, Tensor]:
        """The states among the outputs of a response, as inputs. Copied: a row of a batch keeps all of it in memory,
        and a backend may use its memory again.
        """
        return {
            self._input_of[each.name]: Tensor(
                self._input_of[each.name], each.datatype, each.shape, array=each.array.copy()
            )
            for each in outputs
            if each.name in self._input_of
        }
