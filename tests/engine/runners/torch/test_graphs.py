"""Decode steps from fixed buffers, padded to a few sizes: on the CPU the capture is a call, and all else is as on a
GPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.engine.runners.base import StepBatch
from tests.engine.runners.drive import NAN_BYTE, continuations, uniform_batch
from tests.engine.runners.family_goldens import NAMES
from tests.engine.runners.torch.loaded import Loaded, config, load, load_family

pytestmark = pytest.mark.torch
ON: dict[str, Any] = {"runtime_settings": {"graphs": "true"}}


@pytest.mark.parametrize("name", NAMES)
def test_every_family_has_its_tokens(name: str, tmp_path: Path) -> None:
    runner, golden = load_family(name, tmp_path, **ON)
    assert continuations(runner, golden) == [case.token_ids for case in golden.cases]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Loaded, Loaded]:
    """A runner with graphs and one without."""
    folder = tmp_path_factory.mktemp("model")
    plain, _ = load_family("qwen3_windowed", folder, num_blocks=200)
    return load(config(folder, num_blocks=200, **ON)), plain


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 5, 9, 24, 33])
def test_padding_changes_no_logits(pair: tuple[Loaded, Loaded], num_seqs: int) -> None:
    """Another number of rows is another kernel, so they are equal up to rounding."""
    batch = uniform_batch(num_seqs, num_new=1, num_past=70)
    with_graphs, plain = (runner.run(batch).read() for runner in pair)
    assert with_graphs.shape == (num_seqs, plain.shape[1])
    np.testing.assert_allclose(with_graphs, plain, atol=1e-4)


def test_padding_writes_to_no_block_that_sequences_have(tmp_path: Path) -> None:
    runner, _ = load_family("qwen3_windowed", tmp_path, **ON)
    blocks = range(runner.info.num_blocks)
    runner.write_blocks(blocks, [np.full(runner.block_bytes, NAN_BYTE, np.uint8)] * len(blocks))
    batch = uniform_batch(3, num_new=1, num_past=0)
    assert np.isfinite(runner.run(batch).read()).all()
    contents = [np.zeros(runner.block_bytes, np.uint8) for _ in blocks]
    runner.read_blocks(blocks, contents)
    assert [each for each in blocks if (contents[each] != NAN_BYTE).any()] == [0, 1, 2]


def test_a_buffer_has_nothing_of_the_step_before(pair: tuple[Loaded, Loaded]) -> None:
    """A short step after a long one, and back."""
    runner = pair[0]
    short, long = uniform_batch(3, num_new=1, num_past=5), uniform_batch(8, num_new=1, num_past=90)
    first = runner.run(short).read().copy()
    runner.run(long)
    np.testing.assert_array_equal(runner.run(short).read(), first)


def test_rows_that_do_not_sample_are_left_out(pair: tuple[Loaded, Loaded]) -> None:
    batch = uniform_batch(4, num_new=1, num_past=0)
    some = StepBatch(**{**_fields(batch), "sampled_rows": np.array([2, 0], np.int32)})
    with_graphs, plain = (runner.run(some).read() for runner in pair)
    np.testing.assert_allclose(with_graphs, plain, atol=1e-4)


def _fields(batch: StepBatch) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in StepBatch.__slots__}


def test_a_step_larger_than_all_graphs_runs_without_one(tmp_path: Path) -> None:
    runner, _ = load_family("llama_sharded", tmp_path, num_blocks=40, max_num_seqs=4, **ON)
    batch = uniform_batch(16, num_new=1, num_past=3)
    assert runner.run(batch).read().shape == (16, runner.info.vocab_size)
