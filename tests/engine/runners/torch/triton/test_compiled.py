"""Triton's kernels compile for Hopper GPUs, on a machine without one, to code of the kind that is fast there."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

if find_spec("torch") is None or find_spec("triton") is None:
    pytest.skip("needs torch and triton: `make test-torch`", allow_module_level=True)

from tests.engine.runners.torch.triton.worker import Worker, running

pytestmark = pytest.mark.torch
REGISTERS = {
    "Llama 3 8B: decode, 1 sequence": {"decode": 128, "combine": 40},
    "Llama 3 8B: decode, 256 sequences": {"decode": 128},
    "Llama 3 8B: prefill, 2,048 tokens": {"prefill": 224},
    "Llama 3 8B: prefill, 64 tokens": {"prefill": 240},
    "Gemma 2 2B: decode": {"decode": 168, "combine": 40},
    "Gemma 2 2B: prefill, 8,192 tokens": {"prefill": 248},
    "Gemma 2 2B: prefill, 64 tokens": {"prefill": 192},
    "gpt-oss: decode": {"decode": 80, "combine": 32},
    "gpt-oss: prefill, 2,048 tokens": {"prefill": 255},
    "DeepSeek V2 Lite: decode": {"decode": 168, "combine": 32},
    "DeepSeek V2 Lite: prefill, 4,096 tokens": {"prefill": 224},
    "DeepSeek V3, latent: decode": {"decode": 192, "combine": 56},
    "DeepSeek V3, latent: prefill, 512 tokens": {"prefill": 192},
    "DeepSeek V3, latent: store": {"store": 24},
    "DeepSeek V2 Lite, latent: decode": {"decode": 144, "combine": 56},
    "DeepSeek V2 Lite, latent: prefill, 4,096 tokens": {"prefill": 192},
    "Llama 3 8B: store": {"store": 24},
    "Llama 3 8B: rotate and store": {"rotate": 32},
    "Gemma 2 2B: rotate and store, with norms": {"rotate": 56},
    "Phi 3: rotate and store a part of each head": {"rotate": 32},
    "norm of 4,096 elements, with an update": {"rms_norm": 40},
    "norm of heads of 128": {"rms_norm": 32},
    "gate by gelu_pytorch_tanh": {"gate": 32},
    "quantize rows of 14,336 elements": {"quantize_rows": 48},
    "draw of 128,256 tokens": {"weigh": 32, "filter": 64, "sum_chunks": 32, "invert": 48},
}
"""Launches, and the most registers that a thread of each of their kernels takes. A thread of decode for heads of 128
elements takes no more than 128, so that four programs run on a multiprocessor at once."""
DECODE, PREFILL = ([each for each in REGISTERS if f": {kernel}" in each] for kernel in ("decode", "prefill"))
MEMORY = {
    "Llama 3 8B, float32: decode": 227,
    "Llama 3 8B, float32: prefill": 227,
    "99 KiB: Llama 3 8B: prefill, 2,048 tokens": 99,
    "99 KiB: Gemma 2 2B: prefill, 8,192 tokens": 99,
    "99 KiB: DeepSeek V2 Lite: prefill, 4,096 tokens": 99,
    "99 KiB: DeepSeek V2 Lite, latent: prefill, 4,096 tokens": 99,
    **dict.fromkeys(REGISTERS, 227),
}
"""KiB of shared memory that a program has on the launch's GPU. Float32 is for comparing, and other GPUs than Hopper are
to be right: their kernels may spill registers."""


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    folder = tmp_path_factory.mktemp("compiler")
    cache = str(folder / "cache")
    with running(
        "tests.engine.runners.torch.triton.compiling", folder / "log", TRITON_INTERPRET="0", TRITON_CACHE_DIR=cache
    ) as worker:
        yield worker


def kernels_of(compiler: Worker, launch: str) -> list[dict[str, Any]]:
    answer = compiler.ask(launch)
    assert "raised" not in answer, answer["raised"]
    assert answer["kernels"]
    return list(answer["kernels"])


def test_each_launch_has_its_bounds(compiler: Worker) -> None:
    assert set(compiler.ask("names")["names"]) == MEMORY.keys()


@pytest.mark.parametrize("launch", REGISTERS)
def test_a_kernel_takes_few_registers(compiler: Worker, launch: str) -> None:
    kernels = {each["name"]: each["registers"] for each in kernels_of(compiler, launch)}
    assert kernels.keys() == REGISTERS[launch].keys()
    assert {name: taken for name, taken in kernels.items() if taken > REGISTERS[launch][name]} == {}


@pytest.mark.parametrize("launch", REGISTERS)
def test_a_kernel_spills_no_register(compiler: Worker, launch: str) -> None:
    for kernel in kernels_of(compiler, launch):
        assert kernel["stack"] == 0


@pytest.mark.parametrize("launch", MEMORY)
def test_a_program_fits_into_shared_memory(compiler: Worker, launch: str) -> None:
    for kernel in kernels_of(compiler, launch):
        assert kernel["shared"] <= MEMORY[launch] * 1024


@pytest.mark.parametrize("launch", DECODE)
def test_decode_multiplies_on_tensor_cores(compiler: Worker, launch: str) -> None:
    assert kernels_of(compiler, launch)[0]["warp_products"] > 0


@pytest.mark.parametrize("launch", PREFILL)
def test_prefill_multiplies_on_tensor_cores(compiler: Worker, launch: str) -> None:
    # The sums of latent values are too long for as many rows as four warps multiply at once.
    kind = "warp_products" if "latent" in launch else "group_products"
    assert kernels_of(compiler, launch)[0][kind] > 0


@pytest.mark.parametrize("launch", [*DECODE, *PREFILL])
def test_keys_and_values_are_on_their_way_while_others_are_multiplied(compiler: Worker, launch: str) -> None:
    assert kernels_of(compiler, launch)[0]["copies"] > 0
