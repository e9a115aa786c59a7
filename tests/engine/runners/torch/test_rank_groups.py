"""Groups of ranks: models that they cannot share are refused, and they end together."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from sluice.errors import ErrorCode
from tests.engine.runners.conftest import EditableCheckpoint
from tests.engine.runners.drive import continuations, prefill
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.runners.torch.loaded import config
from tests.engine.runners.torch.ranks import check_alone, family_on, group_of, load_runner
from tests.errors import error_of
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.torch
LLAMA = checkpoint_path("llama_tiny")


def children() -> set[int]:
    return {
        each.pid
        for each in psutil.Process().children()
        if "sluice.engine.runners.torch.worker" in " ".join(each.cmdline())
    }


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 6}, "num_attention_heads of this model is 6"),
        ({"num_key_value_heads": 3, "num_attention_heads": 12}, "num_key_value_heads of this model is 3"),
        ({"intermediate_size": 90}, "intermediate_size of this model is 90"),
    ],
    ids=str,
)
def test_a_model_that_ranks_cannot_share_is_refused_before_they_start(
    checkpoint: EditableCheckpoint, fields: dict[str, Any], what: str
) -> None:
    checkpoint.edit(**fields)
    before = children()
    error = error_of(load_runner, config(checkpoint.path, tensor_parallel_size=4))
    assert (error.code, error.param) == (ErrorCode.INVALID, "tensor_parallel_size")
    assert error.message.startswith(f"tensor_parallel_size is 4, but {what}: it must divide ")
    assert children() == before


@pytest.mark.parametrize(
    ("fields", "code", "param", "words"),
    [
        ({"pipeline_parallel_size": 2}, ErrorCode.UNIMPLEMENTED, "pipeline_parallel_size", "use tensor_parallel_size"),
        ({"tensor_parallel_size": 0}, ErrorCode.INVALID, "tensor_parallel_size", "must be at least 1, got 0"),
        ({"tensor_parallel_size": 2, "enable_lora": True}, ErrorCode.UNIMPLEMENTED, "enable_lora", "LoRA adapters are"),
        ({"tensor_parallel_size": 2, "lora_modules": {"a": "/a"}}, ErrorCode.UNIMPLEMENTED, "lora_modules", "not supp"),
    ],
    ids=str,
)
def test_what_ranks_do_not_have_is_refused(fields: dict[str, Any], code: ErrorCode, param: str, words: str) -> None:
    error = error_of(load_runner, config(LLAMA, **fields))
    assert (error.code, error.param) == (code, param)
    assert words in error.message


def test_an_error_of_loading_is_the_same_as_alone_and_no_process_is_left(checkpoint: EditableCheckpoint) -> None:
    before = children()
    alone = error_of(load_runner, config(checkpoint.path, max_model_len=1 << 20))
    error = error_of(load_runner, config(checkpoint.path, max_model_len=1 << 20, tensor_parallel_size=2))
    assert (error.code, error.message, error.param) == (alone.code, alone.message, alone.param)
    assert children() == before


def test_the_cache_has_as_many_blocks_on_all_ranks_and_each_has_its_share_of_the_memory() -> None:
    fields = {"num_blocks": None, "kv_cache_memory_bytes": 1 << 22}
    alone = load_runner(config(LLAMA, **fields))
    runner = load_runner(config(LLAMA, **fields, tensor_parallel_size=2))
    assert runner.info == alone.info
    alone.close()
    runner.close()


def test_a_rank_by_itself_computes_what_transformers_does(tmp_path: Path) -> None:
    check_alone("olmo2", tmp_path, "cpu")


def test_four_ranks_compute_what_transformers_does(tmp_path: Path) -> None:
    """gemma and olmo3 have fewer KV heads than ranks, which are copied; olmo3 normalizes over all heads."""
    with group_of(4) as group:
        for name in ("gemma", "olmo3", "deepseek_v2_groups", "gpt_oss", "phi"):
            with family_on(group, name, tmp_path / name) as (runner, golden):
                assert continuations(runner, golden) == [case.token_ids for case in golden.cases], name


def test_a_rank_that_is_killed_is_told_and_the_step_fails(tmp_path: Path) -> None:
    lost = _Lost()
    with group_of(2, on_loss=lost) as group, family_on(group, "qwen2", tmp_path) as (runner, _):
        os.kill(group.pids[0], signal.SIGKILL)
        assert lost.is_told.wait(PATIENCE_S)
        assert lost.reasons[0] == "rank 1 of 2 ended unexpectedly with code -9"
        with pytest.raises((RuntimeError, OSError)):
            prefill(runner, [1, 2, 3], [2])


def test_a_rank_that_hangs_ends_the_wait_of_the_others(tmp_path: Path) -> None:
    lost = _Lost()
    with group_of(2, on_loss=lost, timeout_s=2.0) as group, family_on(group, "qwen2", tmp_path) as (runner, _):
        prefill(runner, [1, 2, 3], [2])
        os.kill(group.pids[0], signal.SIGSTOP)
        with pytest.raises(RuntimeError, match="Timed out waiting 2000ms"):
            prefill(runner, [1, 2, 3], [2])
        assert lost.reasons[0].startswith("a step of 2 ranks failed: ")


class _Lost:
    """Records why a group was lost."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.is_told = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self.is_told.set()
