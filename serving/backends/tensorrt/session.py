"""A plan that is open on one GPU: arrays in, arrays out."""

from collections.abc import Sequence
from queue import SimpleQueue

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.backends.arrays.session import ArraySession, WholeRun
from serving.backends.tensorrt.context import ExecutionContext
from serving.backends.tensorrt.engine import Engine
from serving.backends.tensorrt.profiles import best_profile, profile_indexes
from serving.instance import Placement
from serving.tensors.tensor import Array
from sluice.errors import ErrorCode, SluiceError

_STRATEGY = "execution_context_allocation_strategy"
_STRATEGIES = ("STATIC", "ON_PROFILE_CHANGE")


class PlanSession(ArraySession):
    """One engine, and for each of its instances a context of each profile that the instance is for.

    A batch gets the profile that fits it best, whichever instance runs it, and waits for a context where others have
    them all.
    """

    library = "TensorRT"

    def __init__(self, engine: Engine, config: ModelConfig, placements: Sequence[Placement]) -> None:
        """On a thread. `placements` are the instances on the engine's GPU. Raises SluiceError INVALID for profiles that
        the engine has not, else INTERNAL with TensorRT's reason.
        """
        self.signature = engine.signature
        self._engine = engine
        strategy = _strategy(config)
        wanted = [
            index for each in placements for index in profile_indexes(each.profiles, engine.num_profiles, each.name)
        ]
        self._profiles = [engine.profile(index) for index in dict.fromkeys(wanted)]
        by_index = {profile.index: profile for profile in self._profiles}
        self._contexts = [ExecutionContext(engine, by_index[index], strategy) for index in wanted]
        self._free: dict[int, SimpleQueue[ExecutionContext]] = {index: SimpleQueue() for index in by_index}
        for context in self._contexts:
            self._free[context.profile.index].put(context)

    def open_run(self) -> WholeRun:
        return WholeRun(self.run)

    def failure_of(self, error: Exception) -> SluiceError:
        return SluiceError(ErrorCode.INTERNAL, f"TensorRT execute failure: {error}")

    def run(self, inputs: dict[str, Array], outputs: list[str]) -> list[Array]:
        """The arrays of `outputs`. Blocks. Raises SluiceError INVALID for shapes that no profile allows."""
        shapes = {name: array.shape for name, array in inputs.items()}
        free = self._free[best_profile(self._profiles, shapes, self._engine.model).index]
        context = free.get()
        try:
            return context.run(inputs, outputs)
        finally:
            free.put(context)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def _strategy(config: ModelConfig) -> str:
    """How contexts hold memory. Raises SluiceError INVALID."""
    if _STRATEGY not in config.parameters:
        return _STRATEGIES[0]
    given = str(config.parameters[_STRATEGY].string_value)
    if given not in _STRATEGIES:
        raise SluiceError(
            ErrorCode.INVALID,
            f"Invalid value for '{_STRATEGY}': '{given}' for model instance '{config.name}'. Supported values are "
            "'STATIC' and 'ON_PROFILE_CHANGE'.",
        )
    return given
