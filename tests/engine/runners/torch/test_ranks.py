"""Ranks that share a model give transformers' tokens, as one process does. One pair of processes loads every family."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.engine.config import Task
from tests.engine.runners.drive import continuations, prefill
from tests.engine.runners.family_goldens import NAMES
from tests.engine.runners.torch.loaded import load_family
from tests.engine.runners.torch.ranks import RankGroup, family_on, group_of

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def pair() -> Iterator[RankGroup]:
    with group_of(2) as group:
        yield group


@pytest.mark.parametrize("name", NAMES)
def test_two_ranks_compute_what_transformers_does(pair: RankGroup, name: str, tmp_path: Path) -> None:
    with family_on(pair, name, tmp_path) as (runner, golden):
        prompt, expected = golden.cases[-1].prompt_token_ids, np.array(golden.logits, np.float32)
        found = prefill(runner, prompt, [len(prompt) // 2, len(prompt) - 1])
        np.testing.assert_allclose(found, expected, rtol=0, atol=3e-5 * float(np.abs(expected).max()))
        assert continuations(runner, golden) == [case.token_ids for case in golden.cases]


@pytest.mark.parametrize("fields", [{"dtype": "bf16"}, {"runtime_settings": {"graphs": "true"}}], ids=str)
def test_ranks_compute_in_short_types_and_from_fixed_buffers(
    pair: RankGroup, fields: dict[str, Any], tmp_path: Path
) -> None:
    with family_on(pair, "qwen2_moe", tmp_path / "ranks", **fields) as (runner, golden):
        together = continuations(runner, golden)
        prompt = golden.cases[-1].prompt_token_ids
        found = prefill(runner, prompt, [len(prompt) - 1])
    alone, _ = load_family("qwen2_moe", tmp_path / "alone", **fields)
    expected = prefill(alone, prompt, [len(prompt) - 1])
    if "dtype" in fields:
        cosine = float((found * expected).sum() / np.linalg.norm(found) / np.linalg.norm(expected))
        assert cosine > 0.95
    else:
        assert together == [case.token_ids for case in golden.cases]


def test_a_model_of_embeddings_gives_whole_hidden_states(pair: RankGroup, tmp_path: Path) -> None:
    with family_on(pair, "qwen2", tmp_path / "ranks", task=Task.EMBED) as (runner, golden):
        found = prefill(runner, golden.cases[-1].prompt_token_ids, [0, 3])
    alone, _ = load_family("qwen2", tmp_path / "alone", task=Task.EMBED)
    np.testing.assert_allclose(found, prefill(alone, golden.cases[-1].prompt_token_ids, [0, 3]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "lfm2", "deepseek_v3"])
def test_blocks_are_copied_out_of_all_ranks_and_back_in(pair: RankGroup, name: str, tmp_path: Path) -> None:
    with family_on(pair, name, tmp_path) as (runner, golden):
        prompt = (golden.cases[-1].prompt_token_ids * 8)[:40]
        prefill(runner, prompt, [])
        expected = _last_token(runner, prompt, [0, 1])
        contents = [np.zeros(runner.block_bytes, np.uint8) for _ in range(2)]
        runner.read_blocks([0, 1], contents)
        size = runner.block_bytes // 2
        assert all(each[:size].any() and each[size:].any() for each in contents)
        runner.write_blocks([0, 1], [np.zeros_like(each) for each in contents])
        runner.write_blocks([7, 3], contents)
        again = [np.empty_like(each) for each in contents]
        runner.read_blocks([7, 3], again)
        np.testing.assert_array_equal(again, contents)
        assert "on 2 ranks" in runner.block_identity
        np.testing.assert_array_equal(_last_token(runner, prompt, [7, 3]), expected)


def _last_token(runner: Any, prompt: list[int], blocks: list[int]) -> np.ndarray:
    """Return the logits of the last token, whose predecessors' keys and values are in `blocks`."""
    from sluice.engine.runners.base import StepBatch

    past = len(prompt) - 1

    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    batch = StepBatch(
        ints(prompt[-1]), ints(past), ints(past), ints(0, 1), ints(*blocks), ints(0, 2), ints(0), past + 1
    )
    rows: np.ndarray = runner.run(batch).read()
    return rows
