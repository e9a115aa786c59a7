"""How many requests and tokens a step takes where no option says: what suits the runtime that will serve a model."""

from collections.abc import Mapping
from pathlib import Path

from engine.config import EngineConfig, Runtime
from engine.delegated.tensorrt_llm.folder import read_folder
from engine.runtimes import choose_runtime
from sluice.errors import SluiceError

_DEFAULTS = EngineConfig(model_path="")
STEP_SIZES = ("max_num_seqs", "max_num_batched_tokens")
"""Fields of EngineConfig."""
CPU_SEQS, CPU_TOKENS = _DEFAULTS.max_num_seqs, _DEFAULTS.max_num_batched_tokens
GPU_SEQS, GPU_TOKENS = 256, 8192
"""A GPU reads its weights for many requests at the cost of one."""


def step_sizes(engine: EngineConfig, given: Mapping[str, int | None]) -> dict[str, int]:
    """Both fields for the model of `engine`: those of `given`, and beside them what goes with them."""
    seqs, tokens = (given[name] for name in STEP_SIZES)
    own_seqs, own_tokens = _own(engine)
    return {
        "max_num_seqs": seqs or min(own_seqs, tokens or own_tokens),
        "max_num_batched_tokens": tokens or max(own_tokens, seqs or 0),
    }


def _own(engine: EngineConfig) -> tuple[int, int]:
    """Of the runtime; why there is none is told at the start."""
    try:
        runtime = choose_runtime(engine).runtime
    except SluiceError:
        return CPU_SEQS, CPU_TOKENS
    return _compiled(engine) or (GPU_SEQS, GPU_TOKENS) if runtime is Runtime.TENSORRT_LLM else (CPU_SEQS, CPU_TOKENS)


def _compiled(engine: EngineConfig) -> tuple[int, int] | None:
    """What a compiled engine takes; None of other models. What is wrong with one is told when it is loaded."""
    try:
        build = read_folder(Path(engine.model_path)).build_config or {}
    except SluiceError:
        return None
    seqs, tokens = build.get("max_batch_size"), build.get("max_num_tokens")
    if isinstance(seqs, int) and isinstance(tokens, int) and 0 < seqs <= tokens:
        return seqs, tokens
    return None
