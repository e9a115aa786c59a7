"""Steps go to the ranks as arrays of int32."""

from dataclasses import fields

import numpy as np
import pytest

from sluice.engine.runners.base import StepBatch
from sluice.engine.runners.torch.followers import Loaded, RankTask, pack, pack_step, unpack, unpack_step
from sluice.errors import ErrorCode, SluiceError
from tests.errors import error_of


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


@pytest.mark.parametrize("sampled", [ints(), ints(2, 3)])
def test_a_step_arrives_as_it_was(sampled: np.ndarray) -> None:
    step = StepBatch(
        ints(5, -1, 7, 9), ints(0, 1, 2, 40), ints(0, 40), ints(0, 3, 4), ints(8, 3, 2), ints(0, 1, 3), sampled, 41
    )
    kind, arrays = unpack(pack_step(step))
    assert kind is RankTask.STEP
    arrived = unpack_step(arrays)
    for field in fields(StepBatch):
        np.testing.assert_array_equal(getattr(arrived, field.name), getattr(step, field.name))
    assert arrived.token_ids.flags.writeable
    assert arrived.token_ids.dtype == np.int32


def test_frames_without_arrays_and_with_empty_ones_are_told_apart() -> None:
    assert unpack(pack(RankTask.UNLOAD)) == (RankTask.UNLOAD, [])
    kind, [empty] = unpack(pack(RankTask.READ, []))
    assert (kind, len(empty)) == (RankTask.READ, 0)


def test_an_error_of_a_rank_is_raised_as_it_was() -> None:
    error = SluiceError(ErrorCode.UNIMPLEMENTED, "no such kernel", param="model_path")
    raised = error_of(Loaded.failed(error).check)
    assert (raised.code, raised.message, raised.param) == (error.code, error.message, error.param)
    assert Loaded(7).check().num_blocks == 7
