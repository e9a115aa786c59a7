"""Our Triton kernels on the device: their results against float64, and how near attention comes to its limits."""

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec

import torch

from benchmarks.gpu.parts import Notes, Setting, Skipped
from benchmarks.gpu.shapes import LLAMA_3_8B, Ceilings, share_of_limit
from benchmarks.gpu.timing import graphed, median_s

LIMITS = {"f32": 2e-6, "f16": 1e-3, "bf16": 5e-3}
"""Largest relative errors, of some roundings."""
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
FAST_CHECKS = ("store", "norm: of heads", "gate: silu")
"""Kernels that Triton's interpreter is soon through with, on the CPU."""
DECODES = ((1, 1024), (1, 8192), (32, 1024), (256, 1024))
PROMPT = 2048
BLOCK_SIZE = 32
_UNCACHED_BLOCKS = 2048
"""So many are larger than a GPU's cache."""
_SCALE = LLAMA_3_8B["head_dim"] ** -0.5


class WrongKernels(Exception):
    """Kernels that fail, or whose results are further from float64 than roundings explain."""


def measure(setting: Setting, notes: Notes) -> None:
    if find_spec("triton") is None:
        raise Skipped("triton is not installed: torch's wheel for CUDA brings it")
    if setting.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # noqa: TID251 - Triton's own, read at its import
    failed = _compare(setting, notes)
    if setting.device == "cuda":
        _time_decode(setting, notes)
        _time_prefill(setting, notes)
    if failed:
        raise WrongKernels(f"{len(failed)} fail: {', '.join(failed)}")


def _compare(setting: Setting, notes: Notes) -> list[str]:
    """Note the error of each kernel in each type. Returns those that are too large."""
    from tests.engine.runners.torch.triton.cases import LARGE_NAMES
    from tests.engine.runners.torch.triton.checks import CHECKS

    failed = []
    for name in FAST_CHECKS if setting.device == "cpu" else CHECKS:
        for dtype in ("f32",) if setting.device == "cpu" else ("bf16",) if name in LARGE_NAMES else TYPES:
            torch.manual_seed(7)
            try:
                error = CHECKS[name](TYPES[dtype], setting.device)
            except Exception as reason:  # one kernel less: the others are of worth
                notes.note(name, **{dtype: f"{type(reason).__name__}: {str(reason)[:200]}"})
                error = float("inf")
            else:
                notes.note(name, **{dtype: error})
            failed += [] if error <= LIMITS[dtype] else [f"{name} in {dtype}"]
    return failed


def _time_decode(setting: Setting, notes: Notes) -> None:
    """Time attention of one layer of an 8B from a graph, over pages of several layers, so that none is in a cache."""
    from sluice.engine.runners.torch.triton import attention

    for batch, context in DECODES:
        num_blocks = batch * context // BLOCK_SIZE
        pages = [_pages(setting, num_blocks) for _ in range(max(1, _UNCACHED_BLOCKS // num_blocks))]
        tables = torch.randperm(num_blocks, device=setting.device).int().view(batch, -1)
        past_lens = torch.full((batch,), context - 1, dtype=torch.int32, device=setting.device)
        queries = _random(setting, batch, LLAMA_3_8B["num_attention_heads"])

        calls = [
            partial(attention.decode, queries, keys, values, tables, past_lens, scale=_SCALE) for keys, values in pages
        ]
        seconds = _time_all(calls, setting.device)
        num_bytes = 2 * pages[0][0].nbytes
        _note(setting, notes, f"decode {batch} x {context}", seconds, partial(_read_s, num_bytes))


def _read_s(num_bytes: int, ceilings: Ceilings) -> float:
    return num_bytes / ceilings.bytes_per_s


def _time_all(calls: Sequence[Callable[[], object]], device: str) -> float:
    """Return the seconds of one of several calls that follow each other."""
    return median_s(graphed(lambda: [call() for call in calls], device), device) / len(calls)


def _time_prefill(setting: Setting, notes: Notes) -> None:
    from sluice.engine.runners.torch.triton import attention

    keys, values = _pages(setting, PROMPT // BLOCK_SIZE)
    tables = torch.randperm(PROMPT // BLOCK_SIZE, device=setting.device).int()[None]
    begins = torch.tensor([0, PROMPT], dtype=torch.int32, device=setting.device)
    queries = _random(setting, PROMPT, LLAMA_3_8B["num_attention_heads"])
    seconds = median_s(
        lambda: attention.prefill(queries, keys, values, tables, begins, begins[:1], scale=_SCALE), setting.device
    )
    operations = 4 * PROMPT**2 / 2 * queries[0].numel()
    _note(setting, notes, f"prefill {PROMPT}", seconds, lambda it: operations / it.flops)


def _note(setting: Setting, notes: Notes, name: str, seconds: float, least_s: Callable[[Ceilings], float]) -> None:
    notes.note(f"attention, {name}", us=seconds * 1e6, **share_of_limit(setting, seconds, least_s))


def _pages(setting: Setting, num_blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = num_blocks, LLAMA_3_8B["num_key_value_heads"], BLOCK_SIZE
    return _random(setting, *shape), _random(setting, *shape)


def _random(setting: Setting, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, LLAMA_3_8B["head_dim"], device=setting.device, dtype=torch.bfloat16)
