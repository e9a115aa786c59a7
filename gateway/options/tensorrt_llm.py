"""Options that only TensorRT-LLM and vLLM obey."""

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.engine.runtime_settings import SettingsTable, nearest_names
from sluice.engine.runtimes import RUNTIMES
from sluice.errors import SluiceError
from sluice.gateway.options.option import OptionError, integer, option, printable_text

_TABLES = [spec.settings for spec in RUNTIMES.values() if spec.settings]
"""The settings of the runtimes that have any."""


def _pair_parser(what: str) -> Any:
    """Return a parser of NAME=TEXT, which `what` describes."""

    def parse(text: str) -> tuple[str, str]:
        name, _, value = (part.strip() for part in text.partition("="))
        if not name or not value:
            raise ValueError(what)
        return name, value

    return parse


def _parse_command(text: str) -> list[str]:
    """Split a command as a shell would."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"a command as a shell would split it ({error})") from None
    if not words:
        raise ValueError("a command, such as 'mpirun -n 8 trtllm-llmapi-launch'")
    return words


def _read_llm_arguments(path: str) -> dict[str, Any]:
    """Read the arguments in a YAML file."""
    from sluice.pipelines.llm.model_folder import read_argument_file

    try:
        return read_argument_file(Path(path))
    except ValueError as error:
        raise ValueError(f"a YAML file of arguments of TensorRT-LLM's LLM class ({error})") from None


@dataclass(frozen=True, slots=True)
class TensorRtLlmOptions:
    """TensorRT-LLM and vLLM: runtimes that have an environment of their own, on machines with GPUs"""

    tensor_parallel_size: int = option(
        "--tensor-parallel-size",
        1,
        integer(1, 1024),
        "GPUS",
        "GPUs that share each layer. More take a larger model and shorten each step, and talk more with each other",
        ("-tp", "--tp-size", "--tp_size"),
    )
    pipeline_parallel_size: int = option(
        "--pipeline-parallel-size",
        1,
        integer(1, 1024),
        "GROUPS",
        "groups of GPUs that have the layers in turn. More take a larger model over slow links; each token passes all "
        "of them",
        ("-pp", "--pp-size", "--pp_size"),
    )
    runtime_settings: tuple[tuple[str, str], ...] = option(
        "--runtime-setting",
        (),
        _pair_parser("KEY=VALUE, such as moe_expert_parallel_size=8"),
        "KEY=VALUE",
        "a setting of the runtime that has no option of its own: an argument of TensorRT-LLM by NVIDIA's own name, "
        "such as kv_cache_config.host_cache_size, or vLLM's engine argument. docs/tensorrt-llm.md has more names. May "
        "be given several times",
        ("--engine-setting",),
        is_many=True,
        separator=";",
    )
    llm_arguments: dict[str, Any] | None = option(
        "--extra-llm-api-options",
        None,
        _read_llm_arguments,
        "FILE",
        "YAML file of arguments of TensorRT-LLM's LLM class, as trtllm-serve takes it, or of vLLM's engine arguments. "
        "It goes over all other options, of every model",
        ("--extra_llm_api_options", "--config"),
    )
    lora_modules: tuple[tuple[str, str], ...] = option(
        "--lora-modules",
        (),
        _pair_parser("NAME=FOLDER, such as sql=/loras/sql"),
        "NAME=FOLDER",
        "a LoRA adapter of MODEL. Clients ask for it as the model MODEL:NAME. May be given several times",
        is_many=True,
    )
    engine_python: str | None = option(
        "--engine-python",
        None,
        printable_text("the path of a Python"),
        "PYTHON",
        "Python that TensorRT-LLM or vLLM is installed for, where it has an environment of its own: it pins other "
        "releases of libraries than the gateway needs. Install this package there too, without its dependencies, and "
        "msgspec, pyzmq and packaging. Default: what `sluice runtime install` has made, else the gateway's",
    )
    launcher: list[str] | None = option(
        "--engine-launcher",
        None,
        _parse_command,
        "COMMAND",
        "command that starts the engine's process, for several nodes: 'mpirun -n 16 trtllm-llmapi-launch'. Default: "
        "none, TensorRT-LLM itself starts a process for each GPU of this machine",
    )

    def __post_init__(self) -> None:
        """Check values as a whole: repeated names, absent folders, unknown settings. Raises OptionError."""
        for what, pairs in (("setting", self.runtime_settings), ("adapter of --lora-modules", self.lora_modules)):
            names = [name for name, _ in pairs]
            repeated = next((name for name in names if names.count(name) > 1), None)
            if repeated is not None:
                raise OptionError(f"the {what} {repeated!r} is given more than once")
        missing = next((folder for _, folder in self.lora_modules if not Path(folder).exists()), None)
        if missing is not None:
            raise OptionError(f"--lora-modules must name folders that there are, got {missing!r}")
        if self.runtime_settings:
            _check_settings(dict(self.runtime_settings))

    def sets(self, field: str) -> bool:
        """Whether a runtime setting stands for that field of EngineConfig."""
        return any(_is_same(table, name, field) for name, _ in self.runtime_settings for table in _TABLES)

    def engine_fields(self) -> dict[str, Any]:
        """Return the fields of EngineConfig that these options set."""
        return {
            "tensor_parallel_size": self.tensor_parallel_size,
            "pipeline_parallel_size": self.pipeline_parallel_size,
            "runtime_settings": dict(self.runtime_settings),
            "llm_arguments": self.llm_arguments or {},
            "lora_modules": dict(self.lora_modules),
            "engine_python": self.engine_python,
            "launcher": self.launcher or [],
        }


def _is_same(table: SettingsTable, name: str, other: str) -> bool:
    return name in table and other in table and table[name] is table[other]


def _check_settings(settings: dict[str, str]) -> None:
    """Raise OptionError unless one runtime takes them all. Which one runs the model is chosen later. Messages name the
    setting and no flag: there are two for it, and a variable."""
    unknown = next((name for name in settings if not any(name in table for table in _TABLES)), None)
    if unknown is not None:
        known = {name for table in _TABLES for name in table}
        raise OptionError(
            f"no runtime has a setting {unknown!r}{nearest_names(unknown, known)}; "
            "docs/tensorrt-llm.md and docs/vllm.md have the names"
        )
    errors = []
    for table in _TABLES:
        try:
            table.check(settings)
        except SluiceError as error:
            errors.append((error.param in table, error.message))
        else:
            return
    # The error of a runtime that has the setting says more than that of one that has it not.
    raise OptionError(max(errors, key=lambda each: each[0])[1])
