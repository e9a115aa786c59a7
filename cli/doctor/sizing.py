"""Whether a model fits into memory, and how much context then fits beside it. Estimates, on the safe side."""

from dataclasses import dataclass

from cli.doctor.facts import ModelSize

RUNTIME_BYTES = 2 << 30
"""Of each GPU: CUDA's context, libraries, workspaces and activations. An estimate."""
DEFAULT_FRACTION = 0.9
"""TensorRT-LLM's share of what is free once the model is loaded."""
_WEIGHT_SHARE = {"int8": 0.52, "int4": 0.3}
"""Of bf16 weights, scales included."""


@dataclass(frozen=True, slots=True)
class Fit:
    """`left_bytes` negative: the weights alone do not fit. `num_tokens` None: config.json does not tell."""

    needed_bytes: int
    left_bytes: int
    num_tokens: int | None


def fit_gpus(size: ModelSize, free_bytes: int, num_gpus: int, cache_width: float, fraction: float) -> Fit:
    """On `num_gpus` that share weights and cache evenly, of which the fullest has `free_bytes`."""
    needed = size.weight_bytes // num_gpus + RUNTIME_BYTES
    left = free_bytes - needed
    return Fit(needed, left, _tokens(size, int(left * fraction) * num_gpus, cache_width))


def fit_host(size: ModelSize, available_bytes: int, quantization: str, cache_width: float) -> Fit:
    """In the host's memory. Weights are mapped from their files, and count as they must stay there to be fast."""
    needed = int(size.weight_bytes * _WEIGHT_SHARE.get(quantization, 1.0))
    left = available_bytes - needed
    return Fit(needed, left, _tokens(size, left, cache_width))


def _tokens(size: ModelSize, cache_bytes: int, cache_width: float) -> int | None:
    if not size.kv_bytes_per_token:
        return None
    return max(int(cache_bytes / (size.kv_bytes_per_token * cache_width)), 0)
