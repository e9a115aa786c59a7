import numpy as np
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import StepBatch
from sluice.engine.runners.openvino.runner import load_runner, num_padding, pad_batch
from tests.engine.runners.goldens import CHECKPOINTS, checkpoint_path

SCRATCH = 99


def decode_batch(num_seqs: int) -> StepBatch:
    """Make a batch of sequences of one token each, in separate blocks."""
    rows, begins = np.arange(num_seqs, dtype=np.int32), np.arange(num_seqs + 1, dtype=np.int32)
    none = np.zeros(num_seqs, np.int32)
    return StepBatch(
        token_ids=rows + 7,
        position_ids=none,
        past_lens=none,
        subsequence_begins=begins,
        block_indices=rows,
        block_indices_begins=begins,
        sampled_rows=rows,
        max_context_len=1,
    )


@pytest.mark.parametrize(
    ("num_tokens", "total"),
    [(1, 1), (31, 31), (32, 32), (33, 36), (37, 40), (61, 64), (64, 64), (65, 80), (512, 512), (2047, 2048)],
)
def test_steps_are_filled_up_to_what_is_fast(num_tokens: int, total: int) -> None:
    assert num_tokens + num_padding(num_tokens) == total


def test_what_is_added_are_sequences_of_their_own_in_the_scratch_block() -> None:
    filled = pad_batch(decode_batch(37), SCRATCH)
    assert len(filled.token_ids) == len(filled.position_ids) == len(filled.past_lens) == 40
    assert filled.subsequence_begins.tolist() == list(range(41))
    assert filled.block_indices_begins.tolist() == list(range(41))
    assert filled.block_indices.tolist() == [*range(37), SCRATCH, SCRATCH, SCRATCH]
    assert filled.sampled_rows.tolist() == list(range(37))
    assert {vector.dtype for vector in (filled.token_ids, filled.block_indices, filled.past_lens)} == {
        np.dtype(np.int32)
    }


def test_the_rows_that_sample_do_not_notice() -> None:
    """Another number of rows is another kernel, so only in float32 are the results equal up to rounding."""
    config = EngineConfig(model_path=str(checkpoint_path(CHECKPOINTS[0])), dtype="f32", num_blocks=40)
    runner = load_runner(config)
    try:
        alone = [runner.run(decode_batch(rows)).read().copy() for rows in (32, 37)]
        np.testing.assert_allclose(alone[1][:32], alone[0], atol=1e-4)
        assert len(alone[1]) == 37
    finally:
        runner.close()
