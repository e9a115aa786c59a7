"""The shapes that are measured on a GPU, the checkpoints made of them, and the least time of their steps."""

from pathlib import Path

import pytest
from safetensors import safe_open

from benchmarks.gpu.executor import nano_vllm_lengths
from benchmarks.gpu.parts import Notes, Setting
from benchmarks.gpu.shapes import Ceilings, checkpoint_of, folder_of, large, share_of_limit
from benchmarks.models import S, tensor_shapes

H200 = Ceilings(bytes_per_s=4.3e12, flops=790e12)


def setting(folder: Path, *, is_tiny: bool) -> Setting:
    return Setting("cpu", is_tiny, folder, folder)


def test_an_8b_reads_its_weights_and_its_cache_in_each_step(tmp_path: Path) -> None:
    shape = large(setting(tmp_path, is_tiny=False))
    assert shape.read_elements * 2 == pytest.approx(15.01e9, rel=1e-3)
    assert H200.decode_s(shape, 1, 1024) == pytest.approx(3.52e-3, rel=1e-3)
    assert H200.decode_s(shape, 256, 1024) == pytest.approx(12.85e-3, rel=1e-3)
    assert H200.prefill_s(shape, 8192) == pytest.approx(167.0e-3, rel=1e-3)


def test_shares_are_of_what_the_part_of_ceilings_has_measured(tmp_path: Path) -> None:
    here = setting(tmp_path, is_tiny=False)
    assert share_of_limit(here, 1.0, lambda ceilings: 0.5) == {}
    notes = Notes(tmp_path / "ceilings.json")
    notes.note("memory", read_TB_s=4.0, copy_TB_s=4.3)
    notes.note("bf16 product", TFLOP_s=790.0)
    assert Ceilings.read(here) == H200
    assert share_of_limit(here, 2.0, lambda ceilings: 1.0) == {"of_limit": 0.5}


def test_a_checkpoint_has_every_tensor_of_its_shape(tmp_path: Path) -> None:
    folder = checkpoint_of(large(setting(tmp_path, is_tiny=True)), setting(tmp_path, is_tiny=True))
    with safe_open(folder / "model.safetensors", "numpy") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 - no mapping
    assert stored == dict(tensor_shapes(S))
    assert (folder / "tokenizer.json").is_file()
    assert not (folder / "unfinished").exists()


def test_a_folder_for_random_weights_has_none(tmp_path: Path) -> None:
    folder = folder_of(large(setting(tmp_path, is_tiny=True)), setting(tmp_path, is_tiny=True))
    assert (folder / "config.json").is_file()
    assert not [*folder.glob("*.safetensors")]


def test_the_batch_is_that_of_nano_vllm() -> None:
    assert sum(output for _, output in nano_vllm_lengths()) == 133_966
