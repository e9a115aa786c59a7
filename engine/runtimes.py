"""The runtimes there are, and which of them serves a model folder, and why. Adding one takes its folder, with a
`RuntimeSpec`, its name in `sluice.engine.config.Runtime`, and a line here."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from sluice.engine.config import EngineConfig, EngineRole, Runtime, Task
from sluice.engine.delegated.tensorrt_llm.runtime import TENSORRT_LLM
from sluice.engine.delegated.vllm.runtime import VLLM
from sluice.engine.model_folder import ModelFormat, model_format, served_task
from sluice.engine.runners.openvino.runtime import OPENVINO
from sluice.engine.runners.torch.runtime import TORCH
from sluice.engine.runtime_spec import Appraisal, Fitness, RuntimeSpec
from sluice.errors import ErrorCode, SluiceError, invalid
from sluice.machine import num_gpus

RUNTIMES: Mapping[Runtime, RuntimeSpec] = MappingProxyType(
    {spec.runtime: spec for spec in (OPENVINO, TENSORRT_LLM, VLLM, TORCH)}
)
"""All runtimes by name."""
BUNDLED = next(spec for spec in RUNTIMES.values() if not spec.library)
"""The runtime that comes with the gateway."""

IsInstalled = Callable[[RuntimeSpec, str | None], bool]


@dataclass(frozen=True, slots=True)
class RuntimeChoice:
    """A runtime, and why it was chosen: for the log."""

    runtime: Runtime
    reason: str

    @property
    def spec(self) -> RuntimeSpec:
        return RUNTIMES[self.runtime]


def runtimes_for(found: ModelFormat | None) -> list[RuntimeSpec]:
    """Return the runtimes that take a folder of this format; all where the format is unknown."""
    return [spec for spec in RUNTIMES.values() if found is None or found in spec.formats]


def is_loadable(found: ModelFormat | None, engine_python: str | None = None) -> bool:
    """Whether some runtime that takes a folder of this format is installed, for `engine_python` if that is given."""
    return any(spec.is_installed(engine_python) for spec in runtimes_for(found))


def choose_runtime(
    config: EngineConfig,
    *,
    count_gpus: Callable[[], int] = num_gpus,
    is_installed: IsInstalled = RuntimeSpec.is_installed,
) -> RuntimeChoice:
    """Return the runtime that `config` asks for, else the one that suits its model on this machine best. Raises
    UNAVAILABLE where the runtime is not installed, INVALID where it cannot run such a folder on such a device, or
    has no KV tiers of ours and `config` asks for them."""
    found = model_format(Path(config.model_path))
    if config.runtime is Runtime.AUTO:
        choice = best_runtime(config, found, count_gpus=count_gpus, is_installed=is_installed)
    else:
        choice = RuntimeChoice(config.runtime, "it was asked for")
    spec, task = choice.spec, served_task(config)
    if task is not Task.GENERATE and config.role is EngineRole.PREFILL:
        raise invalid("role", f"role prefill is for models that generate; this one serves to {task}")
    if task not in spec.tasks | spec.tasks_on_request:
        able = " or ".join(
            f"--runtime {each.runtime}" for each in RUNTIMES.values() if task in each.tasks | each.tasks_on_request
        )
        raise invalid("task", f"{spec.title} does not serve models for {task}; use {able}")
    if not is_installed(spec, config.engine_python):
        raise SluiceError(
            ErrorCode.UNAVAILABLE,
            f"{spec.title} would run {config.model_path} ({choice.reason}), but it is not installed for "
            f"{config.engine_python or 'this Python'}; {spec.remedy}{_bundled_instead(task)}. `sluice doctor` says "
            "what this machine has",
        )
    if found is not None and found not in spec.formats:
        others = " or ".join(f"--runtime {each.runtime}" for each in runtimes_for(found))
        raise SluiceError(
            ErrorCode.INVALID,
            f"{config.model_path} is {found.phrase}, which {spec.title} cannot run; serve the HuggingFace checkpoint "
            f"that it was made of, or use {others}",
        )
    spec.check_device(config)
    spec.check_kv_tiers(config)
    spec.check_role(config)
    return choice


def _bundled_instead(task: Task) -> str:
    if task not in BUNDLED.tasks:
        return ""
    return f", or serve the HuggingFace checkpoint with --runtime {BUNDLED.runtime}"


def best_runtime(
    config: EngineConfig,
    found: ModelFormat | None,
    *,
    count_gpus: Callable[[], int] = num_gpus,
    is_installed: IsInstalled = RuntimeSpec.is_installed,
) -> RuntimeChoice:
    """Return the runtime that suits a model of format `found` best; the only one that takes it, if installed or not."""
    task = served_task(config)
    candidates = [spec for spec in runtimes_for(found) if task in spec.tasks] or runtimes_for(found)
    if task is not Task.GENERATE and len(candidates) == 1:
        return RuntimeChoice(candidates[0].runtime, f"it alone serves such a folder for {task}")
    if found is not None and len(candidates) == 1:
        return RuntimeChoice(candidates[0].runtime, f"the folder holds {found.phrase}")
    num_found = count_gpus()
    appraisals: dict[Runtime, Appraisal] = {}
    for spec in candidates:
        appraisals[spec.runtime] = spec.appraise(config, num_found, partial(is_installed, spec, config.engine_python))
    best = max(appraisals, key=lambda runtime: appraisals[runtime].fitness)
    declined = [each.reason for each in appraisals.values() if each.fitness is Fitness.DECLINED]
    return RuntimeChoice(best, appraisals[best].reason or "; ".join(dict.fromkeys(declined)))
