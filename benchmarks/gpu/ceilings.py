"""Measures torch's own operations: figures of the other parts are shares of these."""

import torch
from torch.nn.functional import linear

from benchmarks.gpu.parts import Notes, Setting
from benchmarks.gpu.shapes import Ceilings, large
from benchmarks.gpu.timing import graphed, median_s

FP8 = torch.float8_e4m3fn
LARGEST_FP8 = 448.0
NUM_LAUNCHES = 100


def measure(setting: Setting, notes: Notes) -> None:
    torch.manual_seed(1)
    with torch.inference_mode():
        for part in (_memory, _products, _launches, _fp8, _skinny):
            part(setting, notes)


def _memory(setting: Setting, notes: Notes) -> None:
    size = 1 << (20 if setting.is_tiny else 32)
    source = torch.randn(size // 4, device=setting.device)
    target = torch.empty_like(source)
    copied_s = median_s(lambda: target.copy_(source), setting.device)
    read_s = median_s(source.sum, setting.device)
    notes.note("memory", read_TB_s=size / read_s / 1e12, copy_TB_s=2 * size / copied_s / 1e12)


def _products(setting: Setting, notes: Notes) -> None:
    size = 128 if setting.is_tiny else 8192
    x, y = _random(setting, size, size), _random(setting, size, size)
    seconds = median_s(lambda: x @ y, setting.device)
    notes.note("bf16 product", TFLOP_s=2 * size**3 / seconds / 1e12)


def _launches(setting: Setting, notes: Notes) -> None:
    """Time launches of next to nothing, one after the other, alone and from a graph."""
    x = torch.zeros(1, device=setting.device)

    def launch() -> None:
        for _ in range(NUM_LAUNCHES):
            x.add_(1.0)

    alone, replayed = (median_s(each, setting.device) for each in (launch, graphed(launch, setting.device)))
    notes.note("launch", us=alone * 1e6 / NUM_LAUNCHES, in_graph_us=replayed * 1e6 / NUM_LAUNCHES)


def _fp8(setting: Setting, notes: Notes) -> None:
    """Time products of rows and columns with a scale each, and what that takes from their precision."""
    size = 128 if setting.is_tiny else 8192
    x, y = _random(setting, size, size), _random(setting, size, size)
    (x8, x_scale), (y8, y_scale) = _quantized(x), _quantized(y)

    def product() -> torch.Tensor:
        return torch._scaled_mm(x8, y8.T, scale_a=x_scale, scale_b=y_scale.T, out_dtype=torch.bfloat16)

    exact = linear(x, y).float()
    seconds = median_s(product, setting.device)
    error = float((product().float() - exact).norm() / exact.norm())
    notes.note("fp8 product", TFLOP_s=2 * size**3 / seconds / 1e12, error=error)


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = x.abs().amax(1, keepdim=True).float() / LARGEST_FP8
    return (x / scale).to(FP8), scale


def _skinny(setting: Setting, notes: Notes) -> None:
    """Compare products of few rows and the matrices of a layer with the time it takes to read or to multiply them."""
    ceilings, config = Ceilings.read(setting), large(setting).config
    assert ceilings is not None, "this part has written it"
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    matrices = {
        "qkv": ((heads + 2 * kv_heads) * dim, hidden),
        "o": (hidden, heads * dim),
        "gate and up": (2 * wide, hidden),
        "down": (hidden, wide),
        "head": (config["vocab_size"], hidden),
    }
    for name, (num_out, num_in) in matrices.items():
        # So many matrices that none is in a cache when its turn comes.
        count = 1 if setting.is_tiny else max(1, int(3e8 / (num_out * num_in * 2)))
        weights = [_random(setting, num_out, num_in) for _ in range(count)]
        shares = {}
        for rows in (1, 3) if setting.is_tiny else (1, 16, 64, 256, 2048):
            seconds = _time_products(setting, _random(setting, rows, num_in), weights)
            least = max(2 * num_out * num_in / ceilings.bytes_per_s, 2 * rows * num_out * num_in / ceilings.flops)
            shares[f"rows_{rows}"] = round(least / seconds, 3)
        notes.note(f"{name}, share of its limit", **shares)


def _time_products(setting: Setting, x: torch.Tensor, weights: list[torch.Tensor]) -> float:
    call = graphed(lambda: [linear(x, weight) for weight in weights], setting.device)
    return median_s(call, setting.device, repeats=10) / len(weights)


def _random(setting: Setting, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=setting.device, dtype=torch.bfloat16)
