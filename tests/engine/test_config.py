import pytest

from engine.config import EngineConfig
from sluice.errors import ErrorCode, SluiceError


def test_decode_must_fit_into_a_step() -> None:
    EngineConfig(model_path="", max_num_seqs=8, max_num_batched_tokens=8)
    with pytest.raises(SluiceError, match=r"at least max_num_seqs \(8\).*got 7") as caught:
        EngineConfig(model_path="", max_num_seqs=8, max_num_batched_tokens=7)
    assert caught.value.code is ErrorCode.INVALID
    assert caught.value.param == "max_num_batched_tokens"
