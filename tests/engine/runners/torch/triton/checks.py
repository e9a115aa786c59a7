"""Compares each kernel with plain torch in float64, on random tensors of any device and type."""

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from sluice.engine.runners.torch import fp8
from sluice.engine.runners.torch.triton import attention, elementwise, sampling
from sluice.engine.sampling.cores import ONE_CORE
from sluice.engine.sampling.draw import draw
from sluice.engine.sampling.sampler import collect_draws
from sluice.engine.sampling.state import SamplingState
from sluice.engine.types import SamplingParams
from tests.engine.runners.torch.triton.cases import CASES, LARGE_CASES, LARGE_NAMES, NAMES, SPLITS, Case
from tests.engine.runners.torch.triton.pages import BLOCK, Pages, attended
from tests.engine.runners.torch.triton.worker import Answer, serve

Check = Callable[[torch.dtype, str], float]
"""(type, device) -> ‖result - expected‖ / ‖expected‖."""
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_EPS = 1e-6


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the relative error, which is NaN if anything in the result is."""
    return float((result.double().cpu() - expected).norm() / expected.norm())


# -- attention


def decode(case: Case, splits: int | None = None) -> Check:
    def check(dtype: torch.dtype, device: str) -> float:
        pages, sinks = Pages(case, dtype, device), torch.randn(case.num_heads) if case.has_sinks else None
        queries = torch.randn(len(case.lengths), case.num_heads, case.head_dim).to(dtype)
        expected = [
            attended(query[None].double(), tokens, case, sinks)
            for query, tokens in zip(queries, pages.tokens, strict=True)
        ]
        past_lens = torch.tensor(case.lengths, dtype=torch.int32) - 1
        result = attention.decode(
            in_longer_rows(queries, device), pages.keys, pages.values, pages.tables, past_lens.to(device),
            **_options(case, sinks, device), num_splits=splits,
        )  # fmt: skip
        return error(result, torch.cat(expected))

    return check


def prefill(case: Case) -> Check:
    def check(dtype: torch.dtype, device: str) -> float:
        pages, sinks = Pages(case, dtype, device), torch.randn(case.num_heads) if case.has_sinks else None
        queries = torch.randn(sum(case.new), case.num_heads, case.head_dim).to(dtype)
        expected = [
            attended(query.double(), tokens, case, sinks)
            for query, tokens in zip(queries.split(case.new), pages.tokens, strict=True)
        ]
        lengths, new = (torch.tensor(each, dtype=torch.int32) for each in (case.lengths, case.new))
        begins = torch.nn.functional.pad(new.cumsum(0), (1, 0)).int()
        result = attention.prefill(
            in_longer_rows(queries, device), pages.keys, pages.values, pages.tables, begins.to(device),
            (lengths - new).to(device), **_options(case, sinks, device),
        )  # fmt: skip
        return error(result, torch.cat(expected))

    return check


def _options(case: Case, sinks: torch.Tensor | None, device: str) -> dict[str, Any]:
    return {
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "sinks": None if sinks is None else sinks.to(device),
        "latent_dim": case.latent_dim,
    }


def in_longer_rows(heads: torch.Tensor, device: str) -> torch.Tensor:
    """Return the same heads on a device, as a part of longer rows whose rest is NaN."""
    longer = torch.full((len(heads), heads.shape[1] + 4, heads.shape[2]), torch.nan, dtype=heads.dtype, device=device)
    part = longer[:, 2:-2]
    part.copy_(heads)
    return part


def store_latent(dtype: torch.dtype, device: str) -> float:
    keys, slots = torch.randn(3, 1, 16).to(dtype), torch.tensor([5, 33, 64])
    pages, _ = pages_of_sevens(1, dtype, device)
    attention.store(in_longer_rows(keys, device), None, pages, None, slots.int().to(device))
    return error(pages, with_tokens(pages, slots, keys))


def store(dtype: torch.dtype, device: str) -> float:
    keys, values, slots = torch.randn(3, 9, 16), torch.randn(3, 9, 12), torch.tensor([5, 33, 64])
    keys, values = keys.to(dtype), values.to(dtype)
    key_pages, value_pages = pages_of_sevens(9, dtype, device)
    attention.store(
        in_longer_rows(keys, device), in_longer_rows(values, device), key_pages, value_pages, slots.int().to(device)
    )
    return max(
        error(key_pages, with_tokens(key_pages, slots, keys)),
        error(value_pages, with_tokens(value_pages, slots, values)),
    )


def pages_of_sevens(num_heads: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return three blocks of keys of 16 elements, and of values of 12."""
    shape = 3, num_heads, BLOCK
    keys, values = (torch.full((*shape, size), 7.0, dtype=dtype, device=device) for size in (16, 12))
    return keys, values


def with_tokens(pages: torch.Tensor, slots: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
    """Return pages of sevens with each token's heads in its slot, float64."""
    expected = torch.full(pages.shape, 7.0, dtype=torch.float64)
    expected[slots // BLOCK, :, slots % BLOCK] = heads.double()
    return expected


# -- elementwise


def norm_of_stream(dtype: torch.dtype, device: str) -> float:
    x, update, weight = (torch.randn(shape).to(dtype) for shape in ((5, 1000), (5, 1000), (1000,)))
    stream = x.to(device, copy=True)
    result = elementwise.rms_norm(stream, weight.to(device), _EPS, offset=1.0, update=update.to(device))
    expected = (x.float() + update.float()).to(dtype).double()
    return max(error(stream, expected), error(result, normed(expected) * (weight.double() + 1)))


def norm_of_heads(dtype: torch.dtype, device: str) -> float:
    heads, weight = torch.randn(5, 3, 12).to(dtype), torch.randn(12).to(dtype)
    result = elementwise.rms_norm(in_longer_rows(heads, device), weight.to(device), _EPS)
    return error(result, normed(heads.double()) * weight.double())


def normed(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + _EPS).sqrt()


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_pytorch_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
}


def gate(activation: str) -> Check:
    def check(dtype: torch.dtype, device: str) -> float:
        both = (torch.randn(3, 2200) * 3).to(dtype)
        gates, ups = both.to(device).chunk(2, 1)
        expected = ACTIVATIONS[activation](both[:, :1100].double()) * both[:, 1100:].double()
        return error(elementwise.gate(gates, ups, activation), expected)

    return check


def quantize_rows(dtype: torch.dtype, device: str) -> float:
    """Of values that 8 bits have exactly, as the interpreter's rounding to them is wrong: it loses what is carried into
    the exponent. A row of zeros is among them, and one of NaN; on a GPU also values that are rounded."""
    both = torch.randn(5, 2200).clamp(-4, 4).mul(64).to(fp8.TYPE).to(dtype)
    both[:, 30], both[1], both[2, 7] = 448, 0, torch.nan
    both[3] /= 1024
    if device == "cuda":
        both[0] = torch.randn(2200)
    codes, scales = elementwise.quantize_rows(both.to(device).chunk(2, 1)[0])
    found = codes.cpu().double() * scales.cpu()
    assert found.isnan().all(1).tolist() == [False, False, True, False, False]
    codes, scales = fp8.quantize_rows(both[:, :1100].float())
    return error(torch.cat((found[:2], found[3:])), (codes.double() * scales)[[0, 1, 3, 4]])


def rotate(head_dim: int, half: int) -> Check:
    def check(dtype: torch.dtype, device: str) -> float:
        heads, (cosines, sines) = torch.randn(4, 9, head_dim).to(dtype), tables(half)
        positions = torch.tensor([0, 19, 3, 3])
        result = elementwise.rotate(
            in_longer_rows(heads, device), cosines.to(device), sines.to(device), positions.int().to(device)
        )
        return error(result, turned(heads.double(), cosines[positions], sines[positions]))

    return check


def rotate_and_store(dtype: torch.dtype, device: str) -> float:
    queries, keys, values = (torch.randn(3, *size).to(dtype) for size in ((10, 16), (2, 16), (2, 12)))
    query_norm, key_norm = torch.randn(2, 16).to(dtype)
    slots, (cosines, sines) = torch.tensor([5, 33, 64]), (each[:3].contiguous() for each in tables(6))
    key_pages, value_pages = pages_of_sevens(2, dtype, device)
    result = elementwise.rotate_and_store(
        in_longer_rows(queries, device), in_longer_rows(keys, device), in_longer_rows(values, device), key_pages,
        value_pages, slots.int().to(device), cosines.to(device), sines.to(device),
        norms=(query_norm.to(device), key_norm.to(device)), eps=_EPS, norm_offset=1.0,
    )  # fmt: skip
    expected_query, expected_key = (
        turned(normed(heads.double()) * (weight.double() + 1), cosines, sines)
        for heads, weight in ((queries, query_norm), (keys, key_norm))
    )
    return max(
        error(result, expected_query),
        error(key_pages, with_tokens(key_pages, slots, expected_key)),
        error(value_pages, with_tokens(value_pages, slots, values)),
    )


def tables(half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cosines and sines of some angles by 20 positions, with an amplitude."""
    angles = torch.arange(20)[:, None] * 0.7 ** torch.arange(half)
    return angles.cos() * 1.25, angles.sin() * 1.25


def turned(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    half = cosines.shape[1]
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    cosines, sines = cosines.double()[:, None], sines.double()[:, None]
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines, rest), -1)


# -- sampling


def draw_tokens(vocab_size: int, num_rows: int = 16) -> Check:
    """Return a check whose error is the share of rows that draw another token than the host's sampler does."""

    def check(dtype: torch.dtype, device: str) -> float:
        # Logits of a short type, in which several are the same.
        logits = (torch.randn(num_rows, vocab_size) * 3).bfloat16().to(dtype)
        states = [
            SamplingState(
                SamplingParams(
                    temperature=(0.3, 1.0, 1.7)[row % 3], top_k=(0, 1, 40)[row // 2 % 3],
                    top_p=(1.0, 0.9, 0.2)[row // 3 % 3], min_p=(0.0, 0.05)[row // 5 % 2], seed=row,
                ), [], frozenset(), vocab_size,
            )
            for row in range(num_rows)
        ]  # fmt: skip
        draws = collect_draws(states, torch.arange(num_rows).numpy())
        expected, _ = draw(logits.float().numpy().copy(), draws, ONE_CORE)
        parameters = (draws.sharpness, draws.top_k, draws.top_p, draws.min_p, draws.uniform)
        tokens = sampling.draw(logits.to(device), *(torch.from_numpy(each).to(device) for each in parameters))
        return float((tokens.cpu() != torch.from_numpy(expected)).double().mean())

    return check


CHECKS: dict[str, Check] = {
    **{f"decode: {name}, {splits} splits": decode(CASES[name], splits) for name in CASES for splits in SPLITS},
    **{f"prefill: {name}": prefill(CASES[name]) for name in CASES},
    "store": store,
    "store: latent keys": store_latent,
    "norm: of the stream, with an update": norm_of_stream,
    "norm: of heads": norm_of_heads,
    **{f"gate: {activation}": gate(activation) for activation in ACTIVATIONS},
    "quantize: 1,100 elements": quantize_rows,
    "rotate: whole heads": rotate(16, 8),
    "rotate: a part of each head": rotate(20, 6),
    "rotate and store: with norms": rotate_and_store,
    "draw: 1,000 tokens": draw_tokens(1000),
    "draw: 5,000 tokens": draw_tokens(5000, 4),
    **{f"decode: {name}": decode(case) for name, case in LARGE_CASES.items()},
    **{f"prefill: {name}": prefill(case) for name, case in LARGE_CASES.items()},
    "draw: 128,256 tokens": draw_tokens(128_256, 64),
}
assert [*CHECKS] == [*NAMES, *LARGE_NAMES]


# -- the process that interprets


@triton.jit
def _count(number, out):  # type: ignore[no-untyped-def]
    total = 0
    for _ in range(tl.load(number)):
        total += 1
    tl.store(out, total)


def reason_against_interpreting() -> str | None:
    """Return why Triton's interpreter cannot run here, if it cannot run a loop."""
    try:
        _count[(1,)](torch.tensor([3]), torch.zeros(1, dtype=torch.int32))
    except Exception as error:
        return f"the interpreter of triton {triton.__version__} fails with numpy {np.__version__}: {error}"
    return None


def outcome(question: str) -> Answer:
    """Answer `a type: a check's name` with the error or what it raised."""
    dtype, _, name = question.partition(": ")
    if REASON is not None:
        return {"skipped": REASON}
    torch.manual_seed(7)
    try:
        return {"error": CHECKS[name](TYPES[dtype], "cpu")}
    except Exception:  # for the test to show
        return {"raised": traceback.format_exc()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    REASON = reason_against_interpreting()
    serve(outcome)
