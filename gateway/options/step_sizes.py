"""How many requests and tokens a step takes where no option says: what suits the runtime that will serve a model."""

from collections.abc import Mapping

from engine.config import EngineConfig, Runtime
from engine.runtimes import RUNTIMES, choose_runtime
from sluice.errors import SluiceError

STEP_SIZES = ("max_num_seqs", "max_num_batched_tokens")
"""Fields of EngineConfig."""
CPU_SEQS, CPU_TOKENS = RUNTIMES[Runtime.OPENVINO].default_step_sizes
GPU_SEQS, GPU_TOKENS = RUNTIMES[Runtime.TENSORRT_LLM].default_step_sizes


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
        return choose_runtime(engine).spec.step_sizes(engine)
    except SluiceError:
        return CPU_SEQS, CPU_TOKENS
