"""From an EngineConfig to the arguments of TensorRT-LLM's LLM class."""

from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.tensorrt_llm.folder import ModelFolder
from engine.tensorrt_llm.library import Library


@dataclass(frozen=True, slots=True)
class LlmPlan:
    """How the LLM is made: `llm_class(**arguments)`."""

    llm_class: Any
    arguments: dict[str, Any]
    """By keyword; sub-configurations are objects of the library's classes."""
    notes: tuple[str, ...]
    """What was asked for and has no effect, for the log."""
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_beam_width: int
    tokens_per_block: int
    adapters: dict[str, str]
    """Folders of LoRA adapters by name, those of `lora_dir` included."""


def plan_llm(config: EngineConfig, folder: ModelFolder, library: Library) -> LlmPlan:
    """Every argument is checked against the installed version first.

    Raises SluiceError INVALID or UNIMPLEMENTED that names the setting, what it held and what is expected or which
    version has it.
    """
    raise NotImplementedError


def describe(plan: LlmPlan) -> str:
    """The plan as one would write it in Python, without secrets: for the log and for `sluice build --dry-run`."""
    raise NotImplementedError
