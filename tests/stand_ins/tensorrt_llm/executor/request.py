"""Adapters that a request may ask for."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(slots=True)
class LoRARequest:
    """Raises ValueError where the path does not exist."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    lora_ckpt_source: str = "hf"

    def __post_init__(self) -> None:
        if self.lora_path is not None and not (self.lora_path and Path(self.lora_path).exists()):
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path

    @property
    def ckpt_source(self) -> str:
        return self.lora_ckpt_source


@dataclass(slots=True)
class PromptAdapterRequest:
    """Raises RuntimeError where the path does not exist."""

    prompt_adapter_name: str
    prompt_adapter_id: int
    prompt_adapter_local_path: str = ""

    def __post_init__(self) -> None:
        if not Path(self.prompt_adapter_local_path).exists():
            raise RuntimeError(f"prompt_adapter_local_path ({self.prompt_adapter_local_path}) does not exist.")
