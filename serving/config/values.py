"""Values of a configuration that read well and mean something else than they say."""

import re
from collections.abc import Iterator

from tritonclient.grpc.model_config_pb2 import ModelConfig

from serving.findings import ConfigFinding

_CAPABILITY = re.compile(r"[0-9]{2,3}")
_SCHEDULER_POLICY, _BATCH_SCHEDULER_POLICY = "scheduler_policy", "batch_scheduler_policy"


def mend_values(config: ModelConfig) -> list[ConfigFinding]:
    """Correct them in place, and tell what was corrected."""
    return [*_capabilities(config), *_accelerators(config), *_scheduler_policy(config)]


def _capabilities(config: ModelConfig) -> Iterator[ConfigFinding]:
    """`cc_model_filenames` has compute capabilities as NVIDIA writes them, with a point."""
    files = config.cc_model_filenames
    for key in sorted(files):
        capability = f"{key[:-1]}.{key[-1]}"
        if _CAPABILITY.fullmatch(key) and capability not in files:
            files[capability] = files.pop(key)
            message = f'"{key}" is read as the compute capability {capability}'
            yield ConfigFinding(message, f'cc_model_filenames["{key}"].key', f'key: "{capability}"')


def _accelerators(config: ModelConfig) -> Iterator[ConfigFinding]:
    """One without a name is none: what its parameters are for, nobody can say."""
    for kind, example in (("gpu_execution_accelerator", "tensorrt"), ("cpu_execution_accelerator", "openvino")):
        accelerators = getattr(config.optimization.execution_accelerators, kind)
        for index in reversed(range(len(accelerators))):
            if not accelerators[index].name:
                del accelerators[index]
                path = f"optimization.execution_accelerators.{kind}[{index}]"
                message = f"this {kind} has no name, and is left out"
                yield ConfigFinding(message, path, f'{kind} [ {{ name: "{example}" }} ]')


def _scheduler_policy(config: ModelConfig) -> Iterator[ConfigFinding]:
    """Sluice's backends take either word; TensorRT-LLM's own would not find this one."""
    if config.backend == "tensorrtllm" and _SCHEDULER_POLICY in config.parameters:
        value = config.parameters[_SCHEDULER_POLICY].string_value
        yield ConfigFinding(
            f'parameter "{_SCHEDULER_POLICY}" is read as "{_BATCH_SCHEDULER_POLICY}", its name with TensorRT-LLM',
            f'parameters["{_SCHEDULER_POLICY}"].key',
            f'parameters {{ key: "{_BATCH_SCHEDULER_POLICY}" value {{ string_value: "{value}" }} }}',
        )
