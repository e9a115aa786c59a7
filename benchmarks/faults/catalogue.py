"""The servers that take part, by their names in --only. Peers are installed when they are first asked for."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults import adapters, fronts, llama_cpp
from benchmarks.faults.server import Adapter
from benchmarks.figures import ReportProgress
from benchmarks.offline.environments import VLLM, interpreter
from sluice import __version__


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that servers are made of. `vllm_python` is a Python that has vLLM; None for one that is installed."""

    folder: Path
    vllm_python: Path | None
    checkpoint: Path
    report: ReportProgress

    def vllm(self) -> Path:
        """Return a Python that has vLLM."""
        return self.vllm_python or interpreter(VLLM, self.folder / "envs", self.report)


@dataclass(frozen=True, slots=True)
class ServerKind:
    """A column of the tables."""

    name: str
    make: Callable[[Setup], Adapter]


def _llama_cpp(setup: Setup) -> Adapter:
    return llama_cpp.llama_cpp(setup.checkpoint, setup.folder, setup.report)


def _front(make: Callable[..., Adapter]) -> Callable[[Setup], Adapter]:
    return lambda setup: make(_llama_cpp(setup), setup.folder, setup.report)


SERVERS: Mapping[str, ServerKind] = {
    "sluice": ServerKind("Sluice", lambda setup: adapters.sluice(__version__)),
    "sluice-vllm": ServerKind("Sluice over vLLM", lambda setup: adapters.sluice_over_vllm(__version__, setup.vllm())),
    "vllm": ServerKind("vLLM", lambda setup: adapters.vllm(setup.vllm(), setup.folder)),
    "transformers": ServerKind("transformers serve", lambda setup: adapters.transformers(setup.folder, setup.report)),
    "llama.cpp": ServerKind("llama.cpp", _llama_cpp),
    "smg": ServerKind("smg before two llama.cpp", _front(fronts.smg)),
    "litellm": ServerKind("LiteLLM before two llama.cpp", _front(fronts.litellm)),
}
