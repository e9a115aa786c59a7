"""What an ensemble's configuration says: its steps, and which tensors join them."""

from collections.abc import Iterable
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig


@dataclass(frozen=True, slots=True)
class Step:
    """One use of a model. `inputs` and `outputs` say by the model's tensor name which ensemble tensor it is."""

    index: int
    model_name: str
    version: int
    inputs: dict[str, str]
    outputs: dict[str, str]

    @property
    def reads(self) -> Iterable[str]:
        """The ensemble tensors that it waits for."""
        return self.inputs.values()

    @property
    def writes(self) -> Iterable[str]:
        return self.outputs.values()


@dataclass(frozen=True, slots=True)
class Graph:
    """The steps in the configuration's order, and which of them writes each tensor that a step writes."""

    steps: tuple[Step, ...]
    writers: dict[str, Step]

    def needed_for(self, tensors: Iterable[str]) -> frozenset[int]:
        """The indices of the steps without which `tensors` cannot be had."""
        needed: set[int] = set()
        wanted = list(tensors)
        while wanted:
            step = self.writers.get(wanted.pop())
            if step is not None and step.index not in needed:
                needed.add(step.index)
                wanted.extend(step.reads)
        return frozenset(needed)


def graph_of(config: ModelConfig) -> Graph:
    """The graph of a configuration that has been checked."""
    steps = tuple(
        Step(
            index,
            each.model_name,
            each.model_version,
            dict(sorted(each.input_map.items())),
            dict(sorted(each.output_map.items())),
        )
        for index, each in enumerate(config.ensemble_scheduling.step)
    )
    return Graph(steps, {name: step for step in steps for name in step.writes})
