"""The module of LoRA's configuration."""

from ._stand_in.configurations import CONFIGURATIONS

LoraConfig = CONFIGURATIONS["LoraConfig"]
