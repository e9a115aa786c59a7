"""Where LoRA's configuration lived before; the name stays."""

from .lora_helper import LoraConfig

__all__ = ["LoraConfig"]
