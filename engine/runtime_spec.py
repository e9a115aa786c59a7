"""The declaration of a runtime: one `RuntimeSpec`, which everything outside of the runtime's own folder goes by.
Declaring one imports no heavy library. `engine/runtimes.py` registers them."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from sluice.engine.config import EngineConfig, EngineRole, Runtime, Task
from sluice.engine.model_folder import ModelFormat
from sluice.engine.runtime_settings import SettingsTable
from sluice.errors import ErrorCode, SluiceError, invalid

ANSWER_S = 20.0
"""How long another Python may take to start."""
PROCESS_NEEDS = ("engine", "sluice", "msgspec", "zmq", "packaging")
"""Modules that an engine's process imports beside its runtime's library and what that brings."""


class Fitness(IntEnum):
    """How well a runtime suits a model on this machine; `auto` takes the highest."""

    DECLINED = 0
    FALLBACK = 1
    """It serves where no other is better; the reasons of those that decline say why."""
    FASTER = 2
    MISSING = 3
    """It could do what the configuration asks for and others cannot, but is not installed: the error says how."""
    NEEDED = 4
    """It is installed, and can do what the configuration asks for and others cannot."""


class Appraisal(NamedTuple):
    """A runtime's opinion of a model, and the reason for the log."""

    fitness: Fitness
    reason: str = ""


class StepSizes(NamedTuple):
    """How many requests and tokens one step takes."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeInstall:
    """How `sluice runtime install` makes an environment of a runtime's own."""

    on_gpu: tuple[str, ...] = ()
    on_cpu: tuple[str, ...] = ()
    """Distributions with their versions, in the order in which they are installed; none where it does not run there."""
    overrides_on_cpu: tuple[str, ...] = ()
    """Requirements that stand in place of those that the distributions have, for uv."""
    size_gb: float = 0.0
    """Size of the environment on a CPU, about."""
    by_hand: str = ""
    """Text that `sluice runtime install` prints for a runtime that it does not install."""


Appraise = Callable[[EngineConfig, int, Callable[[], bool]], Appraisal]
"""Judges a model whose format the runtime takes. Its arguments are the configuration, the number of GPUs, and a
function that says whether the runtime is installed, which may take a second."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RuntimeSpec:
    """A runtime: its names, what it takes, what it needs, and how `auto` judges it."""

    runtime: Runtime
    """Its name, as `--runtime` and `EngineInfo.runtime` have it."""
    title: str
    """Its name in messages: "TensorRT-LLM"."""
    devices: str
    """The devices that it runs on, in messages: "NVIDIA GPUs"."""
    device_names: tuple[str, ...] = ("auto",)
    """The values of `EngineConfig.device` that it takes."""
    process: str
    """The module that is the engine's process."""
    formats: frozenset[ModelFormat]
    """The model folders that it takes."""
    tasks: frozenset[Task] = frozenset({Task.GENERATE})
    """The things that it serves models for."""
    tasks_on_request: frozenset[Task] = frozenset()
    """Tasks that it serves few models for: `auto` does not choose it for them."""
    appraise: Appraise
    default_step_sizes: StepSizes
    chooses_chunk: bool = False
    """Whether it chooses by load how many tokens of prompts a step takes, where no option says it."""
    dtypes: tuple[str, ...]
    """The values of `EngineConfig.dtype` that it takes."""
    kv_cache_dtypes: tuple[str, ...]
    """The values of `EngineConfig.kv_cache_dtype` that it takes."""
    quantizations: tuple[str, ...]
    """The values of `EngineConfig.quantization` that it takes, beside none."""
    compresses_weights: bool
    """Whether it compresses weights at load. Otherwise `quantization` only names what the checkpoint holds."""
    distributions: tuple[str, ...]
    """Distributions that `sluice doctor` lists; that of `library` is first."""
    min_capability: tuple[int, int] | None = None
    """Oldest compute capability of the NVIDIA GPUs that it needs; None for a runtime that needs no GPU."""
    library: str = ""
    """Module of its library, which may be installed for another Python (`EngineConfig.engine_python`). It is empty for
    a runtime that comes with the gateway."""
    remedy: str = ""
    """Advice for a machine where the library is not installed."""
    install: RuntimeInstall = field(default_factory=RuntimeInstall)
    settings: SettingsTable = field(default_factory=lambda: SettingsTable("", {}))
    """The settings that it takes by name, in `--runtime-setting` and config.pbtxt."""
    built_in_step_sizes: Callable[[EngineConfig], StepSizes | None] = lambda config: None
    """Returns the sizes of a step that a model has built in."""
    sampling_fields: tuple[str, ...] = ()
    """The sampling parameters of `sluice.engine.sampling_fields.OPTIONAL_FIELDS` that it has, in some version."""
    kv_tier_advice: str = ""
    """Advice, in messages, for whoever asks for our KV tiers on a runtime that has others; "" where it has ours."""
    hands_over: bool = False
    """Whether it keeps its own blocks and can still hand prompts over to another engine."""
    ignored_fields: frozenset[str] = frozenset()
    """Fields of EngineConfig that it has no use for."""

    find_problem: Callable[[Path], str] = lambda folder: ""
    """Returns why it cannot load a model folder of a format that it takes, "" where it can."""

    def step_sizes(self, config: EngineConfig) -> StepSizes:
        """Return the sizes of a step where no option gives them."""
        return self.built_in_step_sizes(config) or self.default_step_sizes

    def is_installed(self, python: str | None = None) -> bool:
        """Return whether its library is installed: for `python` if that is given, else for this Python or in the
        environment that `sluice runtime install` makes. The library is not imported: that takes many seconds. Raises
        UNAVAILABLE where there is no such Python."""
        if python is None:
            python = self.default_python()
            if python == sys.executable:
                return True
        return not self.library or (python is not None and _missing_modules(python, (self.library,)) == ())

    def check_process(self, python: str | None) -> None:
        """Raise UNAVAILABLE where `python`, which has the library, lacks what else the engine's process needs."""
        missing = _missing_modules(python, PROCESS_NEEDS) if python is not None and self.library else ()
        if missing:
            raise SluiceError(
                ErrorCode.UNAVAILABLE,
                f"{python} has {self.title}, but not {', '.join(missing)}; in its environment: "
                "pip install --no-deps sluice && pip install msgspec pyzmq packaging",
                param="engine_python",
            )

    def python(self, config: EngineConfig) -> str:
        """Return the Python that runs the engine's process."""
        if not self.library:
            return sys.executable
        return config.engine_python or self.default_python() or sys.executable

    def default_python(self) -> str | None:
        """Return the Python that runs it where none is named: this one if it has the library, else that of the
        environment that `sluice runtime install` has made; None without either."""
        return sys.executable if not self.library or find_spec(self.library) is not None else self.own_python()

    def notes_on_ignored(self, config: EngineConfig) -> list[str]:
        """Return a note on each field of `config` that holds something that this runtime has no use for."""
        names = [name for name in sorted(self.ignored_fields) if getattr(config, name) is not None]
        return [f"{name} has no effect: {self.title} has no use for it" for name in names]

    def check_kv_tiers(self, config: EngineConfig) -> None:
        """Raise INVALID if `config` asks for KV tiers, and this runtime keeps its blocks itself."""
        for name in ("kv_host_cache_bytes", "kv_disk_cache"):
            if self.kv_tier_advice and getattr(config, name):
                raise invalid(
                    name, f"{name} is for another runtime: {self.title} keeps its own blocks; {self.kv_tier_advice}"
                )

    def check_device(self, config: EngineConfig) -> None:
        """Raise INVALID for a device that it cannot compute on, or cannot be told."""
        if config.device not in self.device_names:
            names = " or ".join(self.device_names)
            raise invalid("device", f"device must be {names} on {self.title}, got {config.device!r}")

    def check_role(self, config: EngineConfig) -> None:
        """Raise INVALID if `config` asks for an engine that hands over prompts, and this runtime does not."""
        if self.kv_tier_advice and not self.hands_over and config.role is EngineRole.PREFILL:
            raise invalid("role", f"role prefill is for another runtime: {self.title} keeps its own blocks")

    def own_python(self) -> str | None:
        """Return the Python of the environment that `sluice runtime install` has made; None where there is none."""
        python = own_environment(self.runtime) / "bin" / "python"
        return str(python) if os.path.isfile(python) else None  # unlike Path, without an error for a closed home


def own_environment(runtime: Runtime) -> Path:
    """Return the folder where `sluice runtime install` makes an environment, unless it is told another."""
    return Path.home() / ".local" / "share" / "sluice" / "runtimes" / runtime.value


@cache
def _missing_modules(python: str, modules: tuple[str, ...]) -> tuple[str, ...] | None:
    """Return the modules that `python` does not find; None where it does not answer as a Python does."""
    question = "import sys, importlib.util as util; print('lacks', *(m for m in sys.argv[1:] if not util.find_spec(m)))"
    try:
        answer = subprocess.run((python, "-c", question, *modules), timeout=ANSWER_S, check=False, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        message = f"engine_python must be a Python that can be run, got {python!r}: {error}"
        raise SluiceError(ErrorCode.UNAVAILABLE, message, param="engine_python") from None
    words = answer.stdout.decode(errors="replace").split()
    return tuple(words[1:]) if answer.returncode == 0 and words[:1] == ["lacks"] else None
