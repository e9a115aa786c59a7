"""Errors, backoff, machine and version that every room shares, and the public face of the product.

`from sluice import EngineConfig` looks the name up when it is first asked for, so that `import sluice` itself loads
nothing but the standard library.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sluice.engine.config import EngineConfig
    from sluice.engine.types import SamplingParams
    from sluice.errors import ErrorCode, SluiceError
    from sluice.pipelines.llm.offline import LLM
    from sluice.serving.backend import Backend, BackendContext
    from sluice.serving.model import Model
    from sluice.serving.spec import ModelSource

    __version__: str

__all__ = [
    "LLM",
    "Backend",
    "BackendContext",
    "EngineConfig",
    "ErrorCode",
    "Model",
    "ModelSource",
    "SamplingParams",
    "SluiceError",
    "__version__",
]

_MODULES = {
    "Backend": "sluice.serving.backend",
    "BackendContext": "sluice.serving.backend",
    "EngineConfig": "sluice.engine.config",
    "ErrorCode": "sluice.errors",
    "LLM": "sluice.pipelines.llm.offline",
    "Model": "sluice.serving.model",
    "ModelSource": "sluice.serving.spec",
    "SamplingParams": "sluice.engine.types",
    "SluiceError": "sluice.errors",
}
"""The module that defines each public name."""

# onnxruntime reports to its makers from the moment it is imported, by whatever code. Every process of ours imports this
# package before, and passes its environment on to the processes of models.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # noqa: TID251 - read by the library itself

if not TYPE_CHECKING:  # a type checker that saw it would take any name for public

    def __getattr__(name: str) -> object:
        """Look up a public name, or the version of the installed distribution (PEP 562)."""
        if name == "__version__":
            from importlib.metadata import version  # 10 ms that few processes need

            value: object = version("sluice")
        elif name in _MODULES:
            value = getattr(import_module(_MODULES[name]), name)
        else:
            raise AttributeError(f"sluice has no public name {name!r}; it has: {', '.join(sorted(__all__))}")
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
