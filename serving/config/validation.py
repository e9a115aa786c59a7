"""Validation of configurations, in Triton's words.

Triton validates twice. `check_structure` is the first pass, over the configuration alone: where it fails, there is no
such model, and a load leaves everything as it was. `check_tensors` is the second pass, over the completed configuration
of one version: where it fails, the model is unavailable. Both raise one error with all findings. Its message is the
first of them, as Triton would report it.
"""

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelEnsembling

from sluice.serving.config.completion import ENSEMBLE, fill_defaults
from sluice.serving.config.model_rules import instance_findings, tensor_findings
from sluice.serving.config.scheduling_rules import scheduling_findings
from sluice.serving.findings import Finding, InvalidConfig, invalid_field

_STEPS = "ensemble_scheduling.step"


def check_structure(config: ModelConfig) -> None:
    """Raise InvalidConfig for what is wrong with any model."""
    _raise_any(_structure(config))


def check_tensors(config: ModelConfig, *, is_complete: bool = True) -> None:
    """Raise InvalidConfig for wrong tensors, instances and samples; for missing fields only with `is_complete`."""
    _raise_any((*tensor_findings(config, is_complete=is_complete), *instance_findings(config, is_complete=is_complete)))


def complete_and_check(config: ModelConfig) -> ModelConfig:
    """Return a configuration that a backend has completed, with Triton's defaults. Raises as `check_tensors`."""
    whole = deepcopy(config)
    fill_defaults(whole)
    check_tensors(whole)
    return whole


def check_active_instances(config: ModelConfig) -> None:
    """Raise INVALID where all instances are passive."""
    if config.instance_group and all(group.passive for group in config.instance_group):
        message = f"all instances of model '{config.name}' are passive, and passive ones take no requests"
        raise invalid_field(message, "instance_group")


def _structure(config: ModelConfig) -> Iterator[Finding]:
    if config.max_batch_size < 0:
        message = f"'max_batch_size' must be non-negative value for {config.name}"
        yield Finding(message, "max_batch_size", "max_batch_size: 0 for a model that takes no batches")
    yield from _platform(config)
    yield from scheduling_findings(config)
    yield from _metrics(config)
    yield from _agents(config)
    if config.platform == ENSEMBLE and config.HasField("ensemble_scheduling"):
        yield from _ensemble(config)


def _platform(config: ModelConfig) -> Iterator[Finding]:
    if config.platform == ENSEMBLE:
        if config.backend:
            message = f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type"
            yield Finding(message, "backend", 'platform: "ensemble" without backend')
        if not config.HasField("ensemble_scheduling"):
            message = f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble"
            yield Finding(message, "platform", "ensemble_scheduling { step [ … ] }")
    elif config.HasField("ensemble_scheduling"):
        message = f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
        yield Finding(message, "ensemble_scheduling", 'platform: "ensemble"')


def _metrics(config: ModelConfig) -> Iterator[Finding]:
    for index, control in enumerate(config.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        if not control.HasField("metric_identifier"):
            yield Finding("metric control must specify 'metric_identifier'", path)
        elif not control.metric_identifier.family:
            yield Finding("metric identifier must specify non-empty 'family'", f"{path}.metric_identifier")
        if not control.HasField("histogram_options"):
            yield Finding("metric control must specify 'histogram_options'", path)
        elif not control.histogram_options.buckets:
            yield Finding("histogram options must specify non-empty 'buckets'", f"{path}.histogram_options")


def _agents(config: ModelConfig) -> Iterator[Finding]:
    for index, agent in enumerate(config.model_repository_agents.agents):
        if not agent.name:
            message = f"a repository agent must specify 'name' for {config.name}"
            yield Finding(message, f"model_repository_agents.agents[{index}]", 'name: "checksum"')


def _ensemble(config: ModelConfig) -> Iterator[Finding]:
    """Yield what is wrong with an ensemble whatever its members are. Members are checked when it is loaded."""
    name = config.name
    if not config.ensemble_scheduling.step:
        yield Finding(f"must specify 'step' for ensemble '{name}'", "ensemble_scheduling", "step [ { … } ]")
    if config.instance_group:
        yield Finding(f"instance group should not be specified for ensemble '{name}'", "instance_group")
    if config.HasField("optimization"):
        yield Finding(f"optimization should not be specified for ensemble '{name}'", "optimization")
    if config.model_warmup:
        yield Finding(f"model_warmup can not be specified for ensemble '{name}'", "model_warmup")
    steps = [
        each for index, step in enumerate(config.ensemble_scheduling.step) for each in _ensemble_step(step, index, name)
    ]
    yield from steps
    if not steps:
        yield from _EnsembleTensors(config).findings()


def _ensemble_step(step: ModelEnsembling.Step, index: int, name: str) -> Iterator[Finding]:
    path = f"{_STEPS}[{index}]"
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            yield Finding(f"must specify '{field}' in step {index} of ensemble '{name}'", path)
    for field in ("input_map", "output_map"):
        mapping: Mapping[str, str] = getattr(step, field)
        for key in sorted(key for key, tensor in mapping.items() if not tensor):
            message = f"must specify mapping value for key '{key}' in step {index} of ensemble '{name}'"
            yield Finding(message, f'{path}.{field}["{key}"]')


class _EnsembleTensors:
    """The tensors that connect the steps of one ensemble: each is written once, and read or an output."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._name = config.name
        self._steps = config.ensemble_scheduling.step
        self._inputs = [each.name for each in config.input]
        self._outputs = [each.name for each in config.output]
        self._read = {tensor for step in self._steps for tensor in step.input_map.values()}
        self._written = {tensor for step in self._steps for tensor in step.output_map.values()}
        self._suggested: set[str] = set()
        """Unused tensors that the fix of another finding uses."""

    def findings(self) -> Iterator[Finding]:
        yield from self._written_twice()
        for index, tensor in enumerate(self._inputs):
            if tensor not in self._read:
                # Here and below, the missing apostrophe is Triton's.
                message = f"ensemble input '{tensor}' for ensemble {self._name}' is not used"
                fix = f'input_map {{ key: "…" value: "{tensor}" }} in the step that is to take it'
                yield Finding(message, f"input[{index}].name", fix)
        for index, tensor in enumerate(self._outputs):
            if tensor not in self._written and tensor not in self._inputs:
                message = f"ensemble output '{tensor}' for ensemble {self._name}' is not used"
                yield Finding(message, f"output[{index}].name", self._writing_fix(tensor))
        yield from self._never_written()
        yield from self._never_read()

    def _written_twice(self) -> Iterator[Finding]:
        seen = set(self._inputs)
        for index, step in enumerate(self._steps):
            for key, tensor in sorted(step.output_map.items(), key=lambda each: each[1]):
                if tensor in seen:
                    yield Finding(
                        f"ensemble tensor '{tensor}' can appear in an output map only once for ensemble '{self._name}' "
                        f"step {index}",
                        f'{_STEPS}[{index}].output_map["{key}"].value',
                        "a name of its own",
                    )
                seen.add(tensor)

    def _never_written(self) -> Iterator[Finding]:
        """Run the steps symbolically. Those left over need a tensor that no step writes, or wait for themselves."""
        available = set(self._inputs)
        waiting = dict(enumerate(self._steps))
        while True:
            runnable = [index for index, step in waiting.items() if available.issuperset(step.input_map.values())]
            if not runnable:
                break
            for index in runnable:
                available.update(waiting.pop(index).output_map.values())
        lacks_writer = any(set(step.input_map.values()) - available - self._written for step in waiting.values())
        for index, step in waiting.items():
            for key, tensor in sorted(step.input_map.items(), key=lambda each: each[1]):
                # Where a tensor has no writer, steps that only wait for it are not worth a finding.
                if tensor not in available and (tensor not in self._written or not lacks_writer):
                    yield self._unconnected(index, key, tensor, step)
                    if tensor in self._written:
                        return

    def _unconnected(self, index: int, key: str, tensor: str, step: ModelEnsembling.Step) -> Finding:
        output = min(step.output_map.values())
        message = (
            f"output '{output}' for ensemble '{self._name}' is not written: at least one of its depending tensors, "
            f"'{tensor}', is not connected"
        )
        path = f'{_STEPS}[{index}].input_map["{key}"].value'
        if tensor in self._written:
            return Finding(message, path, "a tensor that does not depend on this step's own outputs")
        others = [*self._inputs, *sorted(self._written - set(step.output_map.values()))]
        listed = " or ".join(f'"{each}"' for each in others)
        return Finding(message, path, f'value: {listed}, or a step with output_map {{ key: "…" value: "{tensor}" }}')

    def _never_read(self) -> Iterator[Finding]:
        for index, step in enumerate(self._steps):
            for key, tensor in sorted(step.output_map.items(), key=lambda each: each[1]):
                if tensor not in self._read and tensor not in self._outputs and tensor not in self._suggested:
                    yield Finding(
                        f"ensemble tensor '{tensor}' is unused in ensemble '{self._name}'",
                        f'{_STEPS}[{index}].output_map["{key}"].value',
                        f'an input_map or an output that takes "{tensor}", or leave this output_map out',
                    )

    def _writing_fix(self, tensor: str) -> str:
        """Return an output map that writes the tensor, preferably from an output that nothing reads."""
        for index, step in reversed(list(enumerate(self._steps))):
            for key, written in sorted(step.output_map.items()):
                if written not in self._read and written not in self._outputs:
                    self._suggested.add(written)
                    where = f"in step {index} ({step.model_name}), which makes '{written}' for nobody"
                    return f'output_map {{ key: "{key}" value: "{tensor}" }} {where}'
        return f'output_map {{ key: "…" value: "{tensor}" }} in the step that makes it'


def _raise_any(findings: Iterable[Finding]) -> None:
    found = tuple(findings)
    if found:
        raise InvalidConfig(found)
