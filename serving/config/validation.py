"""Whether a configuration can be served, in Triton's words.

Triton looks twice. `check_structure` is its first look, at the configuration alone: what fails there was never a model,
and a load of it leaves everything as it was. `check_tensors` is the second, at the completed configuration of one
version: what fails there is a model that is unavailable. Both raise one error with everything that is wrong, whose
message is what Triton would have said first.
"""

from collections.abc import Iterable, Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.config.completion import ENSEMBLE
from serving.config.ensemble_rules import ensemble_findings
from serving.config.model_rules import instance_findings, tensor_findings
from serving.config.scheduling_rules import scheduling_findings
from serving.findings import ConfigFinding, InvalidConfig


def check_structure(config: ModelConfig) -> None:
    """Raises InvalidConfig for what no model can be."""
    _raise_any(_structure(config))


def check_tensors(config: ModelConfig, *, is_complete: bool = True) -> None:
    """Raises InvalidConfig for tensors and instances that cannot be.

    Not `is_complete`: no backend has filled in what the model's file tells, so that what is missing may yet come.
    """
    _raise_any((*tensor_findings(config, is_complete=is_complete), *instance_findings(config, is_complete=is_complete)))


def _structure(config: ModelConfig) -> Iterator[ConfigFinding]:
    if config.max_batch_size < 0:
        message = f"'max_batch_size' must be non-negative value for {config.name}"
        yield ConfigFinding(message, "max_batch_size", "max_batch_size: 0 for a model that takes no batches")
    yield from _platform(config)
    yield from scheduling_findings(config)
    yield from _metrics(config)
    yield from _agents(config)
    if config.platform == ENSEMBLE and config.HasField("ensemble_scheduling"):
        yield from ensemble_findings(config)


def _platform(config: ModelConfig) -> Iterator[ConfigFinding]:
    if config.platform == ENSEMBLE:
        if config.backend:
            message = f"Ensemble model '{config.name}' must have platform type 'ensemble' and empty backend type"
            yield ConfigFinding(message, "backend", 'platform: "ensemble" without backend')
        if not config.HasField("ensemble_scheduling"):
            message = f"ensemble scheduling must be set for ensemble {config.name} whose platform is ensemble"
            yield ConfigFinding(message, "platform", "ensemble_scheduling { step [ … ] }")
    elif config.HasField("ensemble_scheduling"):
        message = f"ensemble scheduling cannot be set for model '{config.name}' whose platform is not ensemble"
        yield ConfigFinding(message, "ensemble_scheduling", 'platform: "ensemble"')


def _metrics(config: ModelConfig) -> Iterator[ConfigFinding]:
    for index, control in enumerate(config.model_metrics.metric_control):
        path = f"model_metrics.metric_control[{index}]"
        if not control.HasField("metric_identifier"):
            yield ConfigFinding("metric control must specify 'metric_identifier'", path)
        elif not control.metric_identifier.family:
            yield ConfigFinding("metric identifier must specify non-empty 'family'", f"{path}.metric_identifier")
        if not control.HasField("histogram_options"):
            yield ConfigFinding("metric control must specify 'histogram_options'", path)
        elif not control.histogram_options.buckets:
            yield ConfigFinding("histogram options must specify non-empty 'buckets'", f"{path}.histogram_options")


def _agents(config: ModelConfig) -> Iterator[ConfigFinding]:
    for index, agent in enumerate(config.model_repository_agents.agents):
        if not agent.name:
            message = f"a repository agent must specify 'name' for {config.name}"
            yield ConfigFinding(message, f"model_repository_agents.agents[{index}]", 'name: "checksum"')


def _raise_any(findings: Iterable[ConfigFinding]) -> None:
    found = tuple(findings)
    if found:
        raise InvalidConfig(found)
