"""Experts multiplied in one product: the same as in a product for each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.errors import ErrorCode
from tests.engine.runners.drive import NAN_BYTE, continuations, prefill, uniform_batch
from tests.engine.runners.family_goldens import NAMES, read_family
from tests.engine.runners.torch.loaded import config, load_family
from tests.engine.runners.torch.loaded import load as load_runner
from tests.errors import error_of
from tests.goldens.checkpoints import write_checkpoint

pytestmark = pytest.mark.torch

import torch  # noqa: E402 - `loaded` skips this file where torch is missing

from sluice.engine.models.config.decoder_config import Experts  # noqa: E402
from sluice.engine.models.kernels import Chosen, ExpertLinear  # noqa: E402
from sluice.engine.runners.torch.experts import choose_grouped, compute_experts  # noqa: E402
from sluice.engine.runners.torch.weights import DeviceWeights, Part, RandomWeights  # noqa: E402

CPU = torch.device("cpu")
GROUPED: dict[str, Any] = {"runtime_settings": {"grouped_experts": "true"}}
SPARSE = [name for name in NAMES if any("expert" in tensor for tensor in read_family(name).blueprint.tensors)]


@pytest.mark.parametrize("name", SPARSE)
def test_every_family_has_its_tokens(name: str, tmp_path: Path) -> None:
    runner, golden = load_family(name, tmp_path, **GROUPED)
    assert continuations(runner, golden) == [case.token_ids for case in golden.cases]
    prompt, expected = golden.cases[-1].prompt_token_ids, np.array(golden.logits)
    found = prefill(runner, prompt, [len(prompt) // 2, len(prompt) - 1])
    assert np.abs(found - expected).max() < 3e-5 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chosen", [[[0, 3], [3, 1], [0, 1]], [[2, 2], [2, 2], [2, 2]], [[3, 2], [1, 0], [2, 3]]])
def test_both_ways_are_equal_whatever_is_chosen(dtype: torch.dtype, chosen: list[list[int]]) -> None:
    """Experts without rows among them: the first, the last, all but one."""
    weights, x = DeviceWeights(RandomWeights(), dtype, CPU), torch.randn(3, 32).to(dtype)
    choice = Chosen(torch.tensor(chosen), torch.rand(3, 2))

    def body(rows: torch.Tensor, linear: ExpertLinear) -> torch.Tensor:
        wide: torch.Tensor = linear(linear(rows, "up", 24, True).relu(), "down", 32, False)
        return wide

    one_by_one, grouped = (
        compute_experts(weights, x, choice, "experts", 4, body, is_grouped=is_grouped) for is_grouped in (False, True)
    )
    assert one_by_one.abs().max() > 0.01
    torch.testing.assert_close(grouped, one_by_one)


def test_the_host_learns_no_numbers() -> None:
    """On tensors without values, where any number that the host asks for is an error: as in the capture of a graph."""
    weights, x = DeviceWeights(_Nothing(), torch.bfloat16, torch.device("meta")), torch.empty(3, 32, device="meta")
    choice = Chosen(torch.zeros(3, 2, dtype=torch.int64, device="meta"), torch.empty(3, 2, device="meta"))

    def compute(is_grouped: bool) -> torch.Tensor:
        return compute_experts(
            weights, x.bfloat16(), choice, "experts", 4, lambda rows, linear: linear(rows, "up", 32, True),
            is_grouped=is_grouped,
        )  # fmt: skip

    assert compute(True).shape == (3, 32)
    with pytest.raises((RuntimeError, NotImplementedError)):
        compute(False)


class _Nothing(RandomWeights):
    def copy(self, name: str, target: torch.Tensor, part: Part | None = None) -> None:
        """There is nothing to be filled."""


def test_a_sequence_of_nan_harms_no_other(tmp_path: Path) -> None:
    runner, _ = load_family("qwen3_moe_some_layers", tmp_path, num_blocks=60, **GROUPED)
    batch = uniform_batch(num_seqs=6, num_new=5, num_past=40)
    clean = runner.run(batch).read().copy()
    runner.write_blocks(range(2), [np.full(runner.block_bytes, NAN_BYTE, np.uint8)] * 2)
    spoilt = runner.run(batch).read()
    assert np.isnan(spoilt[0]).any()
    np.testing.assert_array_equal(spoilt[1:], clean[1:])


def experts(size: int) -> Experts:
    return Experts(num_experts=4, num_chosen=2, size=size, is_normalized=True)


def test_the_cpu_multiplies_one_by_one_unless_it_is_asked_to() -> None:
    assert not choose_grouped(experts(32), 64, None, torch.bfloat16, CPU)
    assert choose_grouped(experts(32), 64, True, torch.bfloat16, CPU)
    assert not choose_grouped(None, 64, True, torch.bfloat16, CPU)


@pytest.mark.parametrize(
    ("capability", "dtype", "size", "expected"),
    [
        ((9, 0), torch.bfloat16, 32, True),
        ((10, 0), torch.bfloat16, 32, True),
        ((9, 0), torch.float16, 32, False),
        ((9, 0), torch.bfloat16, 36, False),
        ((8, 0), torch.bfloat16, 32, False),
        ((12, 0), torch.bfloat16, 32, False),
    ],
)
def test_a_gpu_multiplies_at_once_where_it_has_a_kernel(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: torch.dtype, size: int, expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_grouped(experts(size), 64, None, dtype, torch.device("cuda")) is expected
    if not expected:
        error = error_of(choose_grouped, experts(size), 64, True, dtype, torch.device("cuda"))
        assert (error.code, error.param) == (ErrorCode.INVALID, "grouped_experts")
        assert f"this model computes in {dtype} on cuda, its rows have 64 and {size} elements" in error.message


def test_rows_that_are_not_aligned_are_refused_if_it_is_asked_for(tmp_path: Path) -> None:
    golden = read_family("qwen3_moe_some_layers")
    write_checkpoint(golden.blueprint, tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 31'))
    error = error_of(load_runner, config(tmp_path, **GROUPED))
    assert (error.code, error.param) == (ErrorCode.INVALID, "grouped_experts")
