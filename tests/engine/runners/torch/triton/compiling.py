"""Compiles what the launchers launch, for a GPU that is not there, and reads what the code needs of it."""

import re
import subprocess
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from sluice.engine.runners.torch.triton import attention, elementwise, sampling, tiles
from tests.engine.runners.torch.triton.cases import Case
from tests.engine.runners.torch.triton.worker import Answer, serve

HOPPER, ADA = 90, 89
BF16 = torch.bfloat16
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
_INSTRUCTIONS = {"group_products": "wgmma.mma_async", "warp_products": "mma.sync", "copies": "cp.async.cg"}
"""Products by four warps at once and by one, and asynchronous copies of 16 bytes."""
Launch = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class _Driver:
    """As much of a GPU's driver as compiling needs."""

    capability: int

    def get_current_device(self) -> int:
        return self.capability  # kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


# -- launches, of the shapes that models have; nothing is computed with the tensors

LLAMA = Case(32, 8, 128)
GEMMA2 = Case(8, 4, 256, window=4096, softcap=50.0)
GPT_OSS = Case(64, 8, 64, window=128, has_sinks=True)
PHI3 = Case(32, 32, 96)
DEEPSEEK = Case(16, 16, 192, value_dim=128)
LATENT = Case(128, 1, 576, latent_dim=512)
FEW_LATENT = Case(16, 1, 576, latent_dim=512)


def integers(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.int32)


def pages(case: Case, dtype: torch.dtype = BF16) -> tuple[torch.Tensor, torch.Tensor | None]:
    keys = torch.empty(4, case.num_kv_heads, 32, case.head_dim, dtype=dtype)
    if case.latent_dim is not None:
        return keys, None
    return keys, keys if case.value_dim is None else keys[..., : case.value_dim].contiguous()


def options(case: Case) -> dict[str, Any]:
    sinks = torch.empty(case.num_heads, dtype=BF16) if case.has_sinks else None
    return {"scale": 0.1, "window": case.window, "softcap": case.softcap, "sinks": sinks, "latent_dim": case.latent_dim}


def decode(case: Case, num_seqs: int = 8, dtype: torch.dtype = BF16) -> Launch:
    queries = torch.empty(num_seqs, case.num_heads, case.head_dim, dtype=dtype)
    inputs = integers(num_seqs, 256), integers(num_seqs)
    return lambda: attention.decode(queries, *pages(case, dtype), *inputs, **options(case))


def prefill(case: Case, num_tokens: int, num_seqs: int = 1, dtype: torch.dtype = BF16) -> Launch:
    queries = torch.empty(num_tokens, case.num_heads, case.head_dim, dtype=dtype)
    inputs = integers(num_seqs, 256), integers(num_seqs + 1), integers(num_seqs)
    return lambda: attention.prefill(queries, *pages(case, dtype), *inputs, **options(case))


def parts(case: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values as parts of the product that has them all."""
    product = torch.empty(8, case.num_heads + 2 * case.num_kv_heads, case.head_dim, dtype=BF16)
    queries, keys, values = product.split((case.num_heads, case.num_kv_heads, case.num_kv_heads), 1)
    return queries, keys, values


def store(case: Case) -> Launch:
    if case.latent_dim is not None:
        return lambda: attention.store(torch.empty(8, 1, case.head_dim, dtype=BF16), None, *pages(case), integers(8))
    _, keys, values = parts(case)
    return lambda: attention.store(keys, values, *pages(case), integers(8))


def rotate_and_store(case: Case, half: int, *, has_norms: bool = False) -> Launch:
    table, norm = torch.empty(4096, half), torch.empty(case.head_dim, dtype=BF16)
    inputs = integers(8), table, table, integers(8)
    return lambda: elementwise.rotate_and_store(
        *parts(case), *pages(case), *inputs, norms=(norm, norm) if has_norms else None, eps=1e-6
    )


def rms_norm(*shape: int, has_update: bool = False) -> Launch:
    x = torch.empty(shape, dtype=BF16)
    return lambda: elementwise.rms_norm(
        x, x.view(-1)[: shape[-1]], 1e-6, update=torch.empty_like(x) if has_update else None
    )


def gate(activation: str) -> Launch:
    gates, ups = torch.empty(8, 28672, dtype=BF16).chunk(2, 1)
    return lambda: elementwise.gate(gates, ups, activation)


def quantize_rows(size: int) -> Launch:
    return lambda: elementwise.quantize_rows(torch.empty(8, size, dtype=BF16))


def draw(vocab_size: int) -> Launch:
    numbers = torch.ones(2, dtype=torch.float64)
    return lambda: sampling.draw(
        torch.empty(2, vocab_size, dtype=BF16),
        torch.ones(2),
        torch.ones(2, dtype=torch.int64),
        numbers,
        numbers,
        numbers,
    )


LAUNCHES: dict[str, Launch] = {
    "Llama 3 8B: decode, 1 sequence": decode(LLAMA, 1),
    "Llama 3 8B: decode, 256 sequences": decode(LLAMA, 256),
    "Llama 3 8B: prefill, 2,048 tokens": prefill(LLAMA, 2048),
    "Llama 3 8B: prefill, 64 tokens": prefill(LLAMA, 64),
    "Gemma 2 2B: decode": decode(GEMMA2),
    "Gemma 2 2B: prefill, 8,192 tokens": prefill(GEMMA2, 8192),
    "Gemma 2 2B: prefill, 64 tokens": prefill(GEMMA2, 64),
    "gpt-oss: decode": decode(GPT_OSS),
    "gpt-oss: prefill, 2,048 tokens": prefill(GPT_OSS, 2048),
    "DeepSeek V2 Lite: decode": decode(DEEPSEEK),
    "DeepSeek V2 Lite: prefill, 4,096 tokens": prefill(DEEPSEEK, 4096),
    "DeepSeek V3, latent: decode": decode(LATENT),
    "DeepSeek V3, latent: prefill, 512 tokens": prefill(LATENT, 512),
    "DeepSeek V3, latent: store": store(LATENT),
    "DeepSeek V2 Lite, latent: decode": decode(FEW_LATENT),
    "DeepSeek V2 Lite, latent: prefill, 4,096 tokens": prefill(FEW_LATENT, 4096),
    "Llama 3 8B, float32: decode": decode(LLAMA, dtype=torch.float32),
    "Llama 3 8B, float32: prefill": prefill(LLAMA, 512, dtype=torch.float32),
    "Llama 3 8B: store": store(LLAMA),
    "Llama 3 8B: rotate and store": rotate_and_store(LLAMA, 64),
    "Gemma 2 2B: rotate and store, with norms": rotate_and_store(GEMMA2, 128, has_norms=True),
    "Phi 3: rotate and store a part of each head": rotate_and_store(PHI3, 24),
    "norm of 4,096 elements, with an update": rms_norm(8, 4096, has_update=True),
    "norm of heads of 128": rms_norm(8, 32, 128),
    "gate by gelu_pytorch_tanh": gate("gelu_pytorch_tanh"),
    "quantize rows of 14,336 elements": quantize_rows(14336),
    "draw of 128,256 tokens": draw(128_256),
}
SMALL_LAUNCHES: dict[str, Launch] = {
    "99 KiB: Llama 3 8B: prefill, 2,048 tokens": prefill(LLAMA, 2048),
    "99 KiB: Gemma 2 2B: prefill, 8,192 tokens": prefill(GEMMA2, 8192),
    "99 KiB: DeepSeek V2 Lite: prefill, 4,096 tokens": prefill(DEEPSEEK, 4096),
    "99 KiB: DeepSeek V2 Lite, latent: prefill, 4,096 tokens": prefill(FEW_LATENT, 4096),
}
"""For GPUs whose programs have 99 KiB of shared memory."""


# -- what they need


def kernels_of(launch: Launch, capability: int) -> list[dict[str, Any]]:
    """Return the resources of each kernel that `launch` launches, compiled for this very launch."""
    with _compiling(capability) as kernels:
        launch()
    return [_resources(kernel) for kernel in kernels]


@contextmanager
def _compiling(capability: int) -> Iterator[list[Any]]:
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        kernels.append(run(self, *arguments, grid=grid, warmup=True, **options))

    driver.set_active(_Driver(capability))
    JITFunction.run = compile_only
    try:
        yield kernels
    finally:
        JITFunction.run = run


def _resources(kernel: Any) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_TOOL), "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return {
        "name": kernel.metadata.name.strip("_"),
        "registers": int(found[1]),
        "stack": int(found[2]),
        "shared": kernel.metadata.shared,
        **{name: kernel.asm["ptx"].count(each) for name, each in _INSTRUCTIONS.items()},
    }


def answer(question: str) -> Answer:
    """Answer the name of a launch with its kernels, and `names` with all names."""
    try:
        if question == "names":
            return {"names": [*LAUNCHES, *SMALL_LAUNCHES]}
        if question in LAUNCHES:
            return {"kernels": kernels_of(LAUNCHES[question], HOPPER)}
        tiles._machine = lambda device: (128, 99 * 1024)  # type: ignore[assignment]
        return {"kernels": kernels_of(SMALL_LAUNCHES[question], ADA)}
    except Exception:  # for the test to show
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    serve(answer)
