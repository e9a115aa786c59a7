"""Classes in vLLM's shape, which keep what they are given. `make test-vllm` has the real ones."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from packaging.version import Version

from sluice.engine.delegated.vllm.library import VllmLibrary


class Given(SimpleNamespace):
    """An object whose attributes are its keyword arguments."""


_CLASSES: dict[str, Any] = {
    "vllm.sampling_params:SamplingParams": Given,
    "vllm.sampling_params:StructuredOutputsParams": Given,
    "vllm.pooling_params:PoolingParams": Given,
    "vllm.inputs:tokens_input": lambda ids, **more: {"prompt_token_ids": ids, **more},
    "vllm.lora.request:LoRARequest": Given,
    "vllm.sampling_params:RequestOutputKind": SimpleNamespace(DELTA="delta"),
}


@dataclass(frozen=True, slots=True)
class FakeLibrary(VllmLibrary):
    """A vLLM of which only what a test needs is there."""

    version: Version = field(default_factory=lambda: Version("0.32.0"))
    arguments: frozenset[str] | None = None
    on_cpu: bool = False

    def find(self, name: str) -> Any:
        return _CLASSES[name]

    @property
    def engine_arguments(self) -> frozenset[str]:
        assert self.arguments is not None
        return self.arguments

    @property
    def is_on_cpu(self) -> bool:
        return self.on_cpu
