"""Where LoRA's configuration lives."""

from ._stand_in.configurations import CONFIGURATIONS

LoraConfig = CONFIGURATIONS["LoraConfig"]
