"""The OpenVINO runner generates, in float32, the very tokens that transformers generates."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.runners.base import Runner
from sluice.errors import SluiceError
from tests.engine.runners.drive import Driver, Prompt, prefill
from tests.engine.runners.goldens import CHECKPOINTS, Golden, checkpoint_path, read_goldens
from tests.under_test import load_runner


@pytest.fixture(scope="module", params=CHECKPOINTS)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def runner(name: str) -> Iterator[Runner]:
    runner = load_runner(EngineConfig(model_path=str(checkpoint_path(name)), dtype="f32", num_blocks=300))
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def goldens(name: str) -> list[Golden]:
    return read_goldens(name)


def prompt_of(golden: Golden, first_step: int = 0) -> Prompt:
    return Prompt(golden.prompt_token_ids, golden.max_tokens, golden.repetition_penalty, first_step)


def test_alone(runner: Runner, goldens: list[Golden]) -> None:
    for golden in goldens[::5]:
        assert Driver(runner).generate([prompt_of(golden)]) == [golden.token_ids]


def test_prefill_in_chunks(runner: Runner, goldens: list[Golden]) -> None:
    for golden in goldens[:3]:
        driver = Driver(runner, chunk_sizes=(1, 3, 7, 31, 33, 50))
        assert driver.generate([prompt_of(golden)]) == [golden.token_ids]


def test_in_a_crowd(runner: Runner, goldens: list[Golden]) -> None:
    """Prefill chunks and decodes mixed in one step, rows in random order, blocks scattered."""
    prompts = [prompt_of(golden, first_step=2 * index) for index, golden in enumerate(goldens)]
    driver = Driver(runner, chunk_sizes=(1, 5, 17, 40), seed=3)
    assert driver.generate(prompts) == [golden.token_ids for golden in goldens]


def test_a_step_in_which_nothing_samples(runner: Runner) -> None:
    logits = prefill(runner, [5, 6, 7], sampled_rows=[])
    assert logits.shape == (0, runner.info.vocab_size)


def test_logits_are_the_callers_until_the_next_run(runner: Runner) -> None:
    first = prefill(runner, [5, 6, 7], sampled_rows=[1, 2])
    kept = first.copy()
    assert first.dtype == np.float32
    assert first.flags.writeable
    gc.collect()
    np.testing.assert_array_equal(first, kept)
    first[:] = np.nan
    np.testing.assert_array_equal(prefill(runner, [5, 6, 7], sampled_rows=[1, 2]), kept)


def test_bf16_is_close_to_f32(runner: Runner, name: str) -> None:
    """Also at the end of a long prompt, where rounded rotary angles would show first."""
    try:
        narrow = load_runner(EngineConfig(model_path=str(checkpoint_path(name)), dtype="bf16", num_blocks=16))
    except SluiceError as error:
        if error.param != "dtype":
            raise
        pytest.skip(error.message)  # this CPU has no bf16
    token_ids = np.random.default_rng(0).integers(0, runner.info.vocab_size, 500).tolist()
    rows = list(range(500))
    expected, actual = prefill(runner, token_ids, rows), prefill(narrow, token_ids, rows)
    cosines = (expected * actual).sum(1) / np.linalg.norm(expected, axis=1) / np.linalg.norm(actual, axis=1)
    assert cosines[:100].mean() > 0.999
    assert cosines[-100:].mean() > 0.999
