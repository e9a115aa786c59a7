"""Rules for a model's scheduling: dynamic batching, sequence batching and the response cache, in Triton's words."""

from collections.abc import Iterator, Sequence

from tritonclient.grpc import model_config_pb2
from tritonclient.grpc.model_config_pb2 import (
    ModelConfig,
    ModelDynamicBatching,
    ModelQueuePolicy,
    ModelSequenceBatching,
)

from sluice.serving.findings import Finding

_VALUES = ("int32_false_true", "fp32_false_true", "bool_false_true")
_EITHER = "'int32_false_true', 'fp32_false_true' or 'bool_false_true'"
_CORRELATION_TYPES = ("TYPE_UINT64", "TYPE_INT64", "TYPE_UINT32", "TYPE_INT32", "TYPE_STRING")
_STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
_DYNAMIC, _SEQUENCE = "dynamic_batching", "sequence_batching"


def scheduling_findings(config: ModelConfig) -> Iterator[Finding]:
    """Yield what contradicts itself or exceeds a maximum."""
    if config.HasField(_DYNAMIC):
        yield from _dynamic_batching(config.dynamic_batching, config)
    if config.HasField(_SEQUENCE):
        yield from _sequence_batching(config.sequence_batching, config)
    yield from _cache(config)
    yield from _custom_batching(config)


def _dynamic_batching(batching: ModelDynamicBatching, config: ModelConfig) -> Iterator[Finding]:
    yield from _preferred("dynamic batching preferred size", _DYNAMIC, batching.preferred_batch_size, config)
    levels = batching.priority_levels
    if levels and not 1 <= batching.default_priority_level <= levels:
        yield Finding(
            f"default priority level must be in range [1, {levels}] for {config.name}",
            f"{_DYNAMIC}.default_priority_level",
            f"default_priority_level: {(levels + 1) // 2}",
        )
    for level in sorted(batching.priority_queue_policy) if levels else ():
        if not 1 <= level <= levels:
            message = f"priority queue policy must have priority level in range [1, {levels}] for {config.name}"
            yield Finding(message, f'{_DYNAMIC}.priority_queue_policy["{level}"]')
    if batching.preserve_ordering:
        yield from _ordering(batching, config.name)


def _ordering(batching: ModelDynamicBatching, name: str) -> Iterator[Finding]:
    """With `preserve_ordering`, no request may be served before an earlier one."""
    path = f"{_DYNAMIC}.preserve_ordering"
    if batching.priority_levels > 1:
        message = f"Only one priority level is allowed when 'preserve_ordering' is true for {name}"
        yield Finding(message, path, "priority_levels: 1")
    policies = (batching.default_queue_policy, *batching.priority_queue_policy.values())
    if any(each.default_timeout_microseconds and each.timeout_action == ModelQueuePolicy.DELAY for each in policies):
        message = f"Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true for {name}"
        yield Finding(message, path, "timeout_action: REJECT")


def _preferred(what: str, batcher: str, sizes: Sequence[int], config: ModelConfig) -> Iterator[Finding]:
    is_reported = False
    for index, size in enumerate(sizes):
        path = f"{batcher}.preferred_batch_size[{index}]"
        if size <= 0:
            yield Finding(f"{what} must be positive for {config.name}", path)
        elif size > config.max_batch_size and not is_reported:
            fix = f"max_batch_size: {max(sizes)}"
            fix += f", or preferred sizes up to {config.max_batch_size}" if config.max_batch_size > 0 else ""
            is_reported = True
            yield Finding(f"{what} must be <= max batch size for {config.name}", path, fix)


def _sequence_batching(batching: ModelSequenceBatching, config: ModelConfig) -> Iterator[Finding]:
    yield from _controls(batching, config.name)
    what = "sequence batching preferred batch size"
    yield from _preferred(what, f"{_SEQUENCE}.oldest", batching.oldest.preferred_batch_size, config)
    if not 0 <= batching.direct.minimum_slot_utilization <= 1:
        message = f"sequence batching minimum slot utilization must be in range (0.0, 1.0] for {config.name}"
        yield Finding(message, f"{_SEQUENCE}.direct.minimum_slot_utilization")
    for index, state in enumerate(batching.state):
        yield from _state(state, f"{_SEQUENCE}.state[{index}]", config.name)


def _controls(batching: ModelSequenceBatching, name: str) -> Iterator[Finding]:
    kinds: set[int] = set()
    tensors: set[str] = set()
    for index, tensor in enumerate(batching.control_input):
        path = f"{_SEQUENCE}.control_input[{index}]"
        if not tensor.name:
            yield Finding(f"sequence batching control tensor must have a name for {name}", path)
        elif tensor.name in tensors:
            message = f"sequence batching control tensor '{tensor.name}' is specified for multiple control kinds for"
            yield Finding(f"{message} {name}", path)
        tensors.add(tensor.name)
        for number, control in enumerate(tensor.control):
            kind = ModelSequenceBatching.Control.Kind.Name(control.kind)
            if control.kind in kinds:
                yield Finding(f"sequence batching specifies multiple {kind} tensors for {name}", path)
            kinds.add(control.kind)
            yield from _control(control, kind, f"{path}.control[{number}]", name)


def _control(control: ModelSequenceBatching.Control, kind: str, path: str, name: str) -> Iterator[Finding]:
    given = [field for field in _VALUES if getattr(control, field)]
    if control.kind == ModelSequenceBatching.Control.CONTROL_SEQUENCE_CORRID:
        if given:
            message = f"sequence batching must not specify either {_EITHER} for {kind} for {name}"
            yield Finding(message, f"{path}.{given[0]}")
        if model_config_pb2.DataType.Name(control.data_type) not in _CORRELATION_TYPES:
            yield Finding(
                f"unexpected data type for control {kind} for {name}. Allowed data types are TYPE_UINT64, TYPE_INT64, "
                "TYPE_UINT32, TYPE_INT32 and TYPE_STRING",
                f"{path}.data_type",
                "data_type: TYPE_UINT64",
            )
        return
    if not given:
        message = f"sequence batching must specify either {_EITHER} for {kind} for {name}"
        yield Finding(message, path, "int32_false_true: [0, 1]")
    elif len(given) > 1:
        listed = _EITHER.replace(" or ", " and ")
        yield Finding(f"sequence batching specifies more than one from {listed} for {kind} for {name}", path)
    for field in given:
        if len(getattr(control, field)) != 2:
            message = f"sequence batching control '{field}' must have exactly 2 entries for {kind} for {name}"
            yield Finding(message, f"{path}.{field}", f"{field}: [0, 1]")


def _state(state: ModelSequenceBatching.State, path: str, name: str) -> Iterator[Finding]:
    """Check a state. Its initial value is checked at the load, with the files that it names."""
    if not state.dims or any(dim < 1 and dim != -1 for dim in state.dims):
        message = (
            f"sequence batching state '{state.input_name}' dimension must be integer >= 1, or -1 to indicate a "
            f"variable-size dimension for {name}"
        )
        yield Finding(message, f"{path}.dims")
    if state.use_growable_memory and not state.use_same_buffer_for_input_output:
        yield Finding(
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state input name "
            f"'{state.input_name}'.",
            f"{path}.use_growable_memory",
            "use_same_buffer_for_input_output: true",
        )


def _cache(config: ModelConfig) -> Iterator[Finding]:
    if not config.response_cache.enable:
        return
    begin = f"Response Cache does not currently support model {config.name} with"
    fix = "response_cache { enable: false }"
    if config.HasField(_SEQUENCE):
        yield Finding(f"{begin} sequence batching scheduler. Please disable the response cache.", "response_cache", fix)
    if config.model_transaction_policy.decoupled:
        message = f"{begin} 'decoupled' transaction policy. Please disable the response cache."
        yield Finding(message, "response_cache", fix)


def _custom_batching(config: ModelConfig) -> Iterator[Finding]:
    if _STRATEGY in config.parameters:
        yield Finding(
            f"model {config.name} asks for custom batching with the parameter {_STRATEGY}: libraries that form batches "
            "are not loaded",
            f'parameters["{_STRATEGY}"]',
            "dynamic_batching { } in place of that parameter",
        )
