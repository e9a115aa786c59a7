"""The former module of LoRA's configuration; the name stays."""

from .lora_helper import LoraConfig

__all__ = ["LoraConfig"]
