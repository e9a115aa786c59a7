"""Steps that are launched before the last one's tokens are known: on the CPU all is as on a GPU but the time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.engine.runners.base import Draws, StepBatch
from tests.engine.runners.drive import NAN_BYTE, uniform_batch
from tests.engine.runners.torch.loaded import Loaded, load_family
from tests.engine.scripted_executor import ScriptedExecutor

pytestmark = pytest.mark.torch
GRAPHS = pytest.mark.parametrize("graphs", ["false", "true"])
SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"logprobs": 1},
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.5, "seed": 2, "top_k": 20},
    {"temperature": 0.9, "seed": 3, "top_p": 0.8, "min_p": 0.01},
    {"temperature": 0.7, "seed": 4, "typical_p": 0.9},
)


def load(folder: Path, **settings: str) -> Loaded:
    runner, _ = load_family("qwen3_windowed", folder, num_blocks=60, runtime_settings=settings)
    return runner


def answers(runner: Loaded) -> tuple[dict[int, list[int]], int]:
    """Return the tokens of twelve requests that come and go, and how many were not known when they were launched."""
    num_ahead = 0
    launch = runner.launch

    def count(batch: StepBatch, draws: Draws | None) -> Any:
        nonlocal num_ahead
        num_ahead += int((batch.token_ids < 0).sum())
        return launch(batch, draws)

    runner.launch = count  # type: ignore[method-assign]
    bench = ScriptedExecutor(runner, max_num_batched_tokens=64)  # type: ignore[arg-type]
    for stream_id in range(12):
        sampling = SAMPLINGS[stream_id % len(SAMPLINGS)]
        bench.submit(stream_id, [*range(3 + 5 * stream_id)], max_tokens=4 + 3 * stream_id, **sampling)
        bench.step()
    bench.finish()
    assert not bench.failures
    return dict(bench.tokens), num_ahead


@GRAPHS
def test_tokens_are_those_of_steps_in_turn(graphs: str, tmp_path: Path) -> None:
    in_turn, none_ahead = answers(load(tmp_path, graphs=graphs, lookahead="false"))
    ahead, num_ahead = answers(load(tmp_path, graphs=graphs, lookahead="true"))
    assert ahead == in_turn
    assert (none_ahead, num_ahead > 30) == (0, True)


def test_it_is_for_gpus_unless_it_is_asked_for(tmp_path: Path) -> None:
    assert not load(tmp_path).looks_ahead
    assert load(tmp_path, async_scheduling="true").looks_ahead


def step_of(token_ids: list[int], position: int) -> StepBatch:
    """A decode step at `position`, each sequence in blocks of its own."""
    batch = uniform_batch(len(token_ids), num_new=1, num_past=position)
    return StepBatch(
        **{**{name: getattr(batch, name) for name in StepBatch.__slots__}, "token_ids": np.array(token_ids, np.int32)}
    )


@GRAPHS
def test_a_negative_token_is_that_of_a_row_of_the_last_step(graphs: str, tmp_path: Path) -> None:
    runner = load(tmp_path, graphs=graphs, lookahead="true")
    first = runner.launch(step_of([5, 6, 7], 0), None)
    second = runner.launch(step_of([-3, 9, -1], 1), None)
    tokens, _ = first()
    found, peaks = second()
    logits = runner.run(step_of([int(tokens[2]), 9, int(tokens[0])], 1))
    wanted, wanted_peaks = logits.argmax(np.arange(3))
    np.testing.assert_array_equal(found, wanted)
    np.testing.assert_array_equal(peaks, wanted_peaks)


@GRAPHS
def test_a_row_that_is_no_number_says_so_and_gives_the_next_step_some_token(graphs: str, tmp_path: Path) -> None:
    runner = load(tmp_path, graphs=graphs, lookahead="true")
    blocks = range(runner.info.num_blocks)
    runner.write_blocks(blocks, [np.full(runner.block_bytes, NAN_BYTE, np.uint8)] * len(blocks))
    draws = Draws(
        np.array([0]),
        np.ones(1, np.float32),
        np.array([5]),
        np.ones(1),
        np.zeros(1),
        np.ones(1),
        np.array([0.9]),
        np.array([1]),
    )
    first = runner.launch(step_of([5, 6], 3), draws)
    second = runner.launch(step_of([-1, -2], 4), None)
    for step in (first, second):
        token_ids, peaks = step()
        assert not np.isfinite(peaks).any()
        assert ((token_ids >= 0) & (token_ids < runner.info.vocab_size)).all()


def test_a_step_without_logits_has_no_tokens(tmp_path: Path) -> None:
    runner = load(tmp_path, lookahead="true")
    batch = step_of([5, 6], 0)
    fields = {name: getattr(batch, name) for name in StepBatch.__slots__}
    token_ids, peaks = runner.launch(StepBatch(**{**fields, "sampled_rows": np.zeros(0, np.int32)}), None)()
    assert len(token_ids) == len(peaks) == 0
