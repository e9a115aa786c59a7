"""Which request parameters reach which steps of an ensemble."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.request import Parameters
from sluice.errors import invalid

_PREFIX = "step_parameters."
"""`step_parameters.MODEL` in config.pbtxt names, separated by commas, the parameters that are for that step alone."""


@dataclass(frozen=True, slots=True)
class StepParameters:
    """Each step gets all parameters of a request but those that are for others alone.

    So two models may give one name different meanings (`top_k`), and a key that opens one of them stays with it.
    """

    owners: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """By parameter, the models that it is for; one that is not here is for all."""

    def of_step(self, model: str, parameters: Parameters) -> Parameters:
        """A copy, with what the steps of `model` get."""
        owners = self.owners
        if not owners:
            return parameters.copy()
        return {name: value for name, value in parameters.items() if name not in owners or model in owners[name]}


def step_parameters_of(config: ModelConfig) -> StepParameters:
    """Raises SluiceError INVALID for a parameter that names a model which is no step."""
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
