"""The launch of each engine for a model, all with the same KV cache size and number of threads."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.figures import ReportProgress
from benchmarks.models import M, S, build_m, model_s
from benchmarks.offline.environments import GENAI, VLLM, exported, interpreter
from benchmarks.offline.protocol import WorkerOptions
from benchmarks.offline.worker import Launch


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the comparison.

    `kv_cache_tokens` is the capacity of the KV cache. `warmup_share` is the share of the outputs' lengths in the batch
    that warms up: kernels are compiled for each new number of tokens, which matters where steps are short.
    """

    name: str
    make: Callable[[Path, Path], Path]
    vocab_size: int
    kv_cache_gib: int
    kv_cache_tokens: int
    warmup_share: float


MODELS = (
    Model("S", model_s, S["vocab_size"], kv_cache_gib=1, kv_cache_tokens=262_144, warmup_share=1.0),
    Model("M", build_m, M["vocab_size"], kv_cache_gib=3, kv_cache_tokens=28_086, warmup_share=0.1),
)


OURS = "Sluice"


def _sluice(checkpoint: Path, model: Model, folder: Path, report: ReportProgress) -> Launch:
    """Launch the engine of this checkout in this environment."""
    return Launch(OURS, Path(sys.executable), "benchmarks.offline.sluice_worker", _options(checkpoint, model))


def _vllm(checkpoint: Path, model: Model, folder: Path, report: ReportProgress) -> Launch:
    """Launch vLLM's CPU build."""
    return Launch(
        "vLLM",
        interpreter(VLLM, folder / "envs", report),
        "benchmarks.offline.vllm_worker",
        _options(checkpoint, model),
        vllm_variables(model.kv_cache_gib, folder),
    )


def vllm_variables(kv_cache_gib: int, folder: Path) -> tuple[str, ...]:
    """Return the environment of vLLM's CPU build on all cores, as NAME=VALUE. Its compiled graphs are kept under
    `folder`, so that a second launch is quicker."""
    return (
        f"VLLM_CPU_KVCACHE_SPACE={kv_cache_gib}",
        f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, sorted(os.sched_getaffinity(0))))}",
        f"VLLM_CACHE_ROOT={(folder / 'vllm-cache').resolve()}",
        "VLLM_NO_USAGE_STATS=1",
        "HF_HUB_OFFLINE=1",
    )


def _genai(checkpoint: Path, model: Model, folder: Path, report: ReportProgress) -> Launch:
    """Launch OpenVINO GenAI, on the model as optimum-intel exports it."""
    python = interpreter(GENAI, folder / "envs", report)
    ir = exported(checkpoint, folder / "ir", folder / "envs", report)
    options = replace(_options(checkpoint, model), model=str(ir))
    return Launch("GenAI", python, "benchmarks.offline.genai_worker", options)


def _options(checkpoint: Path, model: Model) -> WorkerOptions:
    return WorkerOptions(str(checkpoint.resolve()), model.kv_cache_gib, _num_threads())


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))


ENGINES: dict[str, Callable[[Path, Model, Path, ReportProgress], Launch]] = {
    OURS: _sluice,
    "vLLM": _vllm,
    "GenAI": _genai,
}
"""Launch functions by engine: (checkpoint, model, folder for files to keep, progress). They may install the engine."""
