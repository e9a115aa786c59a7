"""What an ensemble's configuration must be whatever its members are: every tensor made once, and everything used."""

from collections.abc import Iterator, Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelEnsembling

from engine.errors import ErrorCode, SluiceError


def members(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble calls, each once; of any other model none."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def check_ensemble(config: ModelConfig) -> None:
    """Raises SluiceError INVALID in Triton's words. What the members make of it is for their loading to say."""
    name = config.name
    if not config.ensemble_scheduling.step:
        raise _invalid(f"must specify 'step' for ensemble '{name}'")
    if config.instance_group:
        raise _invalid(f"instance group should not be specified for ensemble '{name}'")
    if config.HasField("optimization"):
        raise _invalid(f"optimization should not be specified for ensemble '{name}'")
    for index, step in enumerate(config.ensemble_scheduling.step):
        _check_step(step, index, name)
    producers = _producers(config)
    _check_everything_used(config, producers)
    _check_everything_made(config, producers)


def _check_step(step: ModelEnsembling.Step, index: int, name: str) -> None:
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            raise _invalid(f"must specify '{field}' in step {index} of ensemble '{name}'")
    for field in ("input_map", "output_map"):
        mapping: Mapping[str, str] = getattr(step, field)
        empty = sorted(key for key, tensor in mapping.items() if not tensor)
        if empty:
            raise _invalid(f"must specify mapping value for key '{empty[0]}' in step {index} of ensemble '{name}'")


def _producers(config: ModelConfig) -> dict[str, ModelEnsembling.Step | None]:
    """Who makes each tensor; None for the ensemble's inputs."""
    producers: dict[str, ModelEnsembling.Step | None] = {each.name: None for each in config.input}
    for index, step in enumerate(config.ensemble_scheduling.step):
        for tensor in _sorted(step.output_map):
            if tensor in producers:
                raise _invalid(
                    f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble "
                    f"'{config.name}' step {index}"
                )
            producers[tensor] = step
    return producers


def _check_everything_used(config: ModelConfig, producers: Mapping[str, ModelEnsembling.Step | None]) -> None:
    used = {tensor for step in config.ensemble_scheduling.step for tensor in step.input_map.values()}
    for each in config.input:
        if each.name not in used:
            raise _invalid(f"ensemble input '{each.name}' for ensemble {config.name}' is not used")
    for each in config.output:
        if each.name not in producers:
            raise _invalid(f"ensemble output '{each.name}' for ensemble {config.name}' is not used")
    used.update(each.name for each in config.output)
    unused = next((tensor for tensor, step in producers.items() if step is not None and tensor not in used), None)
    if unused is not None:
        raise _invalid(f"ensemble tensor '{unused}' is unused in ensemble '{config.name}'")


def _check_everything_made(config: ModelConfig, producers: Mapping[str, ModelEnsembling.Step | None]) -> None:
    """Follow the steps as their inputs come to be; what is left waits for a tensor that nobody makes, or for itself."""
    made = {tensor for tensor, step in producers.items() if step is None}
    waiting = list(config.ensemble_scheduling.step)
    while waiting:
        runnable = [step for step in waiting if made.issuperset(step.input_map.values())]
        if not runnable:
            step = waiting[0]
            missing = next(tensor for tensor in _sorted(step.input_map) if tensor not in made)
            output = next(_sorted(step.output_map))
            raise _invalid(
                f"output '{output}' for ensemble '{config.name}' is not written: at least one of its depending "
                f"tensors, '{missing}', is not connected"
            )
        for step in runnable:
            made.update(step.output_map.values())
        waiting = [step for step in waiting if not made.issuperset(step.output_map.values())]


def _sorted(mapping: Mapping[str, str]) -> Iterator[str]:
    return iter(sorted(mapping.values()))


def _invalid(message: str) -> SluiceError:
    return SluiceError(ErrorCode.INVALID, message)
