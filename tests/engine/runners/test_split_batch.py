"""A step of a model whose attention pads sequences is run in parts that fit into memory, with the same logits."""

from pathlib import Path

import numpy as np
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import StepBatch
from sluice.engine.runners.openvino import runner as runner_module
from sluice.engine.runners.openvino.runner import MAX_PADDED_SIZE, load_runner, split_batch
from tests.engine.runners.family_goldens import read_family
from tests.goldens.checkpoints import write_checkpoint


def ragged_batch(num_new: list[int], num_past: list[int], sampled_rows: list[int]) -> StepBatch:
    lengths = np.add(num_new, num_past)
    num_blocks = -(-lengths // 32)
    num_tokens = sum(num_new)
    return StepBatch(
        token_ids=np.arange(num_tokens, dtype=np.int32) % 130 + 3,
        position_ids=np.concatenate(
            [np.arange(past, past + new, dtype=np.int32) for new, past in zip(num_new, num_past, strict=True)]
        ),
        past_lens=np.array(num_past, np.int32),
        subsequence_begins=np.cumsum([0, *num_new], dtype=np.int32),
        block_indices=np.arange(num_blocks.sum(), dtype=np.int32)[::-1].copy(),
        block_indices_begins=np.cumsum([0, *num_blocks], dtype=np.int32),
        sampled_rows=np.array(sampled_rows, np.int32),
        max_context_len=int(lengths.max()),
    )


def test_a_step_that_fits_is_one_part() -> None:
    assert split_batch(ragged_batch([1, 1, 40], [10, 300, 0], [0, 1, 41])) == []


def test_a_long_prompt_does_not_pad_the_sequences_that_decode() -> None:
    batch = ragged_batch([1] * 8 + [2048], [1000] * 9, [*range(8), 2055])
    [(decoding, first), (prompt, last)] = split_batch(batch)
    assert (first.tolist(), last.tolist()) == ([*range(8)], [8])
    assert np.diff(decoding.subsequence_begins).tolist() == [1] * 8
    assert (decoding.max_context_len, prompt.max_context_len) == (1001, 3048)
    assert prompt.sampled_rows.tolist() == [2047]


def test_many_long_contexts_are_several_parts() -> None:
    batch = ragged_batch([1] * 16, [8000] * 16, [])
    sizes = [len(part.past_lens) * 251 * (1 + 128) for part, _ in split_batch(batch)]
    assert len(sizes) > 1
    assert max(sizes) <= MAX_PADDED_SIZE


@pytest.mark.parametrize("max_size", [1, 600])
def test_parts_have_the_logits_of_the_whole(max_size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(read_family("gemma2_softcap").blueprint, tmp_path)
    runner = load_runner(EngineConfig(model_path=str(tmp_path), dtype="f32", num_blocks=60))
    first = ragged_batch([40, 7, 33, 20], [0] * 4, [])
    second = ragged_batch([3, 1, 9, 1], [40, 7, 33, 20], [12, 3, 0, 2, 13])
    tables = first.block_indices_begins, first.block_indices
    assert tables[0].tolist() == second.block_indices_begins.tolist()
    runner.run(first)
    whole = runner.run(second).read().copy()
    monkeypatch.setattr(runner_module, "MAX_PADDED_SIZE", max_size)
    assert len(split_batch(second)) > 1
    runner.run(first)
    np.testing.assert_allclose(runner.run(second).read(), whole, atol=1e-4)
    runner.close()
