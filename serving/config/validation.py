"""Whether a configuration can be served, in Triton's words.

Triton looks twice. `check_structure` is its first look, at the configuration alone: what fails there was never a model,
and a load of it leaves everything as it was. `check_tensors` is the second, at the completed configuration of one
version: what fails there is a model that is unavailable. Both raise one error with everything that is wrong, whose
message is what Triton would have said first.
"""

from collections.abc import Iterable, Iterator, Mapping

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelEnsembling

from serving.config.completion import ENSEMBLE
from serving.config.model_rules import instance_findings, tensor_findings
from serving.config.scheduling_rules import scheduling_findings
from serving.findings import Finding, InvalidConfig


def check_structure(config: ModelConfig) -> None:
    """Raises InvalidConfig for what no model can be."""
    _raise_any(_structure(config))


def check_tensors(config: ModelConfig, *, is_complete: bool = True) -> None:
    """Raises InvalidConfig for tensors and instances that cannot be.

    Not `is_complete`: no backend has filled in what the model's file tells, so that what is missing may yet come.
    """
    _raise_any((*tensor_findings(config, is_complete=is_complete), *instance_findings(config, is_complete=is_complete)))


def _structure(config: ModelConfig) -> Iterator[Finding]:
    if config.max_batch_size < 0:
        message = f"'max_batch_size' must be non-negative value for {config.name}"
        yield Finding(message, "max_batch_size", "max_batch_size: 0 for a model that takes no batches")
    yield from _platform(config)
    yield from scheduling_findings(config)
    yield from _metrics(config)
    yield from _agents(config)
    if config.platform == ENSEMBLE and config.HasField("ensemble_scheduling"):
        yield from ensemble_findings(config)


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


def _raise_any(findings: Iterable[Finding]) -> None:
    found = tuple(findings)
    if found:
        raise InvalidConfig(found)


_STEPS = "ensemble_scheduling.step"


def ensemble_members(config: ModelConfig) -> tuple[str, ...]:
    """The names of the models that an ensemble calls, each once; of any other model none."""
    return tuple(dict.fromkeys(step.model_name for step in config.ensemble_scheduling.step))


def ensemble_findings(config: ModelConfig) -> Iterator[Finding]:
    """In Triton's words and with what to write. What the members make of it is for their loading to say."""
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
        yield from _Tensors(config).findings()


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


class _Tensors:
    """The tensors that join the steps of one ensemble: who makes each, and who takes it."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._name = config.name
        self._steps = config.ensemble_scheduling.step
        self._inputs = [each.name for each in config.input]
        self._outputs = [each.name for each in config.output]
        self._taken = {tensor for step in self._steps for tensor in step.input_map.values()}
        self._made = {tensor for step in self._steps for tensor in step.output_map.values()}
        self._suggested: set[str] = set()
        """What a fix has found a use for."""

    def findings(self) -> Iterator[Finding]:
        yield from self._made_twice()
        for index, tensor in enumerate(self._inputs):
            if tensor not in self._taken:
                # Here and below, the missing apostrophe is the real server's.
                message = f"ensemble input '{tensor}' for ensemble {self._name}' is not used"
                yield Finding(message, f"input[{index}].name", self._take_text(tensor))
        for index, tensor in enumerate(self._outputs):
            if tensor not in self._made and tensor not in self._inputs:
                message = f"ensemble output '{tensor}' for ensemble {self._name}' is not used"
                yield Finding(message, f"output[{index}].name", self._make_text(tensor))
        yield from self._never_made()
        yield from self._never_taken()

    def _made_twice(self) -> Iterator[Finding]:
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

    def _never_made(self) -> Iterator[Finding]:
        """Follow the steps as their inputs come to be; what is left waits for a tensor of nobody, or for itself."""
        there = set(self._inputs)
        waiting = dict(enumerate(self._steps))
        while True:
            runnable = [index for index, step in waiting.items() if there.issuperset(step.input_map.values())]
            if not runnable:
                break
            for index in runnable:
                there.update(waiting.pop(index).output_map.values())
        nobody = any(set(step.input_map.values()) - there - self._made for step in waiting.values())
        for index, step in waiting.items():
            for key, tensor in sorted(step.input_map.items(), key=lambda each: each[1]):
                # Where something is made by nobody, what only waits for that is not worth a line.
                if tensor not in there and (tensor not in self._made or not nobody):
                    yield self._unconnected(index, key, tensor, step)
                    if tensor in self._made:
                        return

    def _unconnected(self, index: int, key: str, tensor: str, step: ModelEnsembling.Step) -> Finding:
        output = min(step.output_map.values())
        message = (
            f"output '{output}' for ensemble '{self._name}' is not written: at least one of its depending tensors, "
            f"'{tensor}', is not connected"
        )
        path = f'{_STEPS}[{index}].input_map["{key}"].value'
        if tensor in self._made:
            return Finding(message, path, "a tensor that does not depend on this step's own outputs")
        others = [*self._inputs, *sorted(self._made - set(step.output_map.values()))]
        listed = " or ".join(f'"{each}"' for each in others)
        return Finding(message, path, f'value: {listed}, or a step with output_map {{ key: "…" value: "{tensor}" }}')

    def _never_taken(self) -> Iterator[Finding]:
        for index, step in enumerate(self._steps):
            for key, tensor in sorted(step.output_map.items(), key=lambda each: each[1]):
                if tensor not in self._taken and tensor not in self._outputs and tensor not in self._suggested:
                    yield Finding(
                        f"ensemble tensor '{tensor}' is unused in ensemble '{self._name}'",
                        f'{_STEPS}[{index}].output_map["{key}"].value',
                        f'an input_map or an output that takes "{tensor}", or leave this output_map out',
                    )

    def _take_text(self, tensor: str) -> str:
        return f'input_map {{ key: "…" value: "{tensor}" }} in the step that is to take it'

    def _make_text(self, tensor: str) -> str:
        """The map that would make it: of an output that nobody takes, where there is one."""
        for index, step in reversed(list(enumerate(self._steps))):
            for key, made in sorted(step.output_map.items()):
                if made not in self._taken and made not in self._outputs:
                    self._suggested.add(made)
                    where = f"in step {index} ({step.model_name}), which makes '{made}' for nobody"
                    return f'output_map {{ key: "{key}" value: "{tensor}" }} {where}'
        return f'output_map {{ key: "…" value: "{tensor}" }} in the step that makes it'
