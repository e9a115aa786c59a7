"""The size of the cache by what a device has free after its largest step. A GPU's memory is numbers here."""

from collections.abc import Callable
from typing import Any

import pytest

from sluice.errors import ErrorCode
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.runners.torch.loaded import Loaded, config
from tests.engine.runners.torch.loaded import load as load_runner
from tests.errors import error_of

pytestmark = pytest.mark.torch

import torch  # noqa: E402 - `loaded` skips this file where torch is missing

from sluice.engine.runners.torch.memory import DeviceMemory, warm_up_steps  # noqa: E402
from sluice.engine.runners.torch.model import TorchModel  # noqa: E402
from sluice.engine.runners.torch.step import DeviceStep  # noqa: E402

LLAMA = checkpoint_path("llama_tiny")
LIMITS: dict[str, Any] = {"num_blocks": None, "max_num_batched_tokens": 96, "max_num_seqs": 7}


class Device(DeviceMemory):
    """A device's memory, of which each token of the largest step so far has taken `per_token`."""

    keeps_freed = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int, per_token: int = 0, most_tokens: int = 1000) -> None:
        self.steps: list[tuple[int, int]] = []
        self.num_released = 0
        self._free, self._per_token = free, per_token
        run: Callable[..., torch.Tensor] = TorchModel.run

        def watched(model: TorchModel, step: DeviceStep, *others: Any) -> torch.Tensor:
            assert step.sampled is not None
            self.steps.append((len(step.token_ids), len(step.sampled)))
            if len(step.token_ids) > most_tokens:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has more to say")
            return run(model, step, *others)

        monkeypatch.setattr(TorchModel, "run", watched)

    def free_bytes(self) -> int:
        return self._free - self._per_token * max(num_tokens for num_tokens, _ in self.steps)

    def release(self) -> None:
        self.num_released += 1


def load(device: Device, **fields: Any) -> Loaded:
    return load_runner(config(LLAMA, **LIMITS | fields), memory=device)


def test_the_cache_has_most_of_what_the_largest_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=10 << 20, per_token=50_000)
    runner = load(device)
    assert (device.steps[0], device.steps[-1]) == ((1, 1), (96, 7))
    assert device.num_released == 1
    assert runner.info.num_blocks == int(0.9 * ((10 << 20) - 96 * 50_000)) // runner.block_bytes


def test_steps_that_compile_kernels_come_before_the_largest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=10 << 20)
    runner = load(device)
    compiling = [(sum(new), len(new)) for _, new in warm_up_steps(runner.info.max_model_len, 96, 7)]
    assert device.steps == [(1, 1), *compiling, (96, 7)]


def test_a_fraction_is_of_what_the_largest_step_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(Device(monkeypatch, free=8 << 20, per_token=1000), kv_cache_memory_fraction=0.5)
    assert runner.info.num_blocks == ((8 << 20) - 96_000) // 2 // runner.block_bytes


def test_several_engines_count_on_their_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = load(Device(monkeypatch, free=8 << 20), memory_share=0.5)
    assert runner.info.num_blocks == int(0.9 * (4 << 20)) // runner.block_bytes


def test_a_step_that_does_not_fit_says_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(load, Device(monkeypatch, free=8 << 20, most_tokens=95))
    assert (error.code, error.param) == (ErrorCode.UNAVAILABLE, "max_num_batched_tokens")
    assert error.message == (
        "beside the weights there is no memory for a step of 96 tokens and 7 sequences: CUDA out of memory; "
        "lower max_num_batched_tokens, or max_num_seqs"
    )


def test_weights_that_do_not_fit_name_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(load, Device(monkeypatch, free=8 << 20, most_tokens=0))
    assert (error.code, error.param) == (ErrorCode.UNAVAILABLE, "model_path")
    assert f"does not hold {LLAMA}: CUDA out of memory" in error.message


def test_no_room_for_one_block_says_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(load, Device(monkeypatch, free=1000))
    assert (error.code, error.param) == (ErrorCode.INVALID, "kv_cache_memory_bytes")
    assert "0.9 of the 1000 bytes that are free with the model loaded" in error.message


def test_the_memory_of_the_machine_is_not_profiled(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=1 << 30)
    load_runner(config(LLAMA, **LIMITS))
    assert device.steps == [(1, 1)]


def test_the_largest_step_may_be_longer_than_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch, free=8 << 20)
    load(device, max_model_len=40)
    assert device.steps[-1] == (96, 7)
