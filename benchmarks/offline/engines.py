"""How each engine is launched for a model, all with the same KV cache size and threads."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.models import M, S, build_m, model_s
from benchmarks.offline.environments import GENAI, VLLM, Say, exported, interpreter
from benchmarks.offline.protocol import Options
from benchmarks.offline.worker import Launch


@dataclass(frozen=True, slots=True)
class Model:
    """A model to compare with.

    `kv_cache_tokens`: what the KV cache holds. `warmup_share`: of the outputs, in the batch that warms up; kernels are
    compiled for each new number of tokens, which shows where steps are short.
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


def _sluice(checkpoint: Path, model: Model, folder: Path, say: Say) -> Launch:
    """This checkout's engine, in this environment."""
    return Launch(OURS, Path(sys.executable), "benchmarks.offline.sluice_worker", _options(checkpoint, model))


def _vllm(checkpoint: Path, model: Model, folder: Path, say: Say) -> Launch:
    """vLLM's CPU build. Its compiled graphs are kept under `folder`, so a second launch is quicker than the first."""
    num_threads = _num_threads()
    variables = (
        f"VLLM_CPU_KVCACHE_SPACE={model.kv_cache_gib}",
        f"VLLM_CPU_OMP_THREADS_BIND={','.join(map(str, sorted(os.sched_getaffinity(0))[:num_threads]))}",
        f"VLLM_CACHE_ROOT={(folder / 'vllm-cache').resolve()}",
        "VLLM_NO_USAGE_STATS=1",
        "HF_HUB_OFFLINE=1",
    )
    return Launch(
        "vLLM",
        interpreter(VLLM, folder / "envs", say),
        "benchmarks.offline.vllm_worker",
        _options(checkpoint, model),
        variables,
    )


def _genai(checkpoint: Path, model: Model, folder: Path, say: Say) -> Launch:
    """OpenVINO GenAI, on the model as optimum-intel exports it."""
    python = interpreter(GENAI, folder / "envs", say)
    ir = exported(checkpoint, folder / "ir", folder / "envs", say)
    options = replace(_options(checkpoint, model), model=str(ir))
    return Launch("GenAI", python, "benchmarks.offline.genai_worker", options)


def _options(checkpoint: Path, model: Model) -> Options:
    return Options(str(checkpoint.resolve()), model.kv_cache_gib, _num_threads())


def _num_threads() -> int:
    return len(os.sched_getaffinity(0))


ENGINES: dict[str, Callable[[Path, Model, Path, Say], Launch]] = {OURS: _sluice, "vLLM": _vllm, "GenAI": _genai}
"""By name: how to launch it for a checkpoint of a model, with a folder for what it keeps. It may install first."""
