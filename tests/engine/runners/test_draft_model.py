"""A draft model beside the model, on the real runtime."""

import dataclasses
from pathlib import Path

import pytest

from sluice.engine.config import EngineConfig, Speculation
from sluice.engine.loop.load import load_draft_runner, load_runner
from sluice.engine.runners.base import RunnerInfo
from sluice.errors import ErrorCode, SluiceError
from tests.engine.runners.goldens import checkpoint_path
from tests.engine.scripted_executor import ScriptedExecutor
from tests.under_test import runtime

pytestmark = pytest.mark.slow

MODEL = checkpoint_path("llama_tiny")


def config(draft: Path | None = MODEL, **limits: object) -> EngineConfig:
    return EngineConfig(
        model_path=str(MODEL),
        dtype="f32",
        num_blocks=16,
        runtime=runtime(),
        speculation=Speculation.DRAFT_MODEL,
        draft_model_path=None if draft is None else str(draft),
        **limits,  # type: ignore[arg-type]
    )


def test_the_draft_model_has_the_blocks_of_the_model_and_its_drafts_are_kept() -> None:
    prompt = list(range(1, 40))
    plain = ScriptedExecutor(load_runner(config()), speculation="off")  # type: ignore[arg-type]
    runner = load_runner(config())
    draft = load_draft_runner(config(), runner.info)
    assert draft is not None
    assert draft.info.num_blocks == runner.info.num_blocks
    drafted = ScriptedExecutor(runner, draft, speculation="draft_model", max_num_batched_tokens=64)  # type: ignore[arg-type]
    for bench in (plain, drafted):
        bench.submit(1, prompt, max_tokens=24, ignore_eos=True)
        bench.finish()
    assert drafted.tokens[1] == plain.tokens[1]
    stats = drafted.executor.stats()
    assert stats.accepted_tokens_total == stats.draft_tokens_total > 0, "the model agrees with itself"
    for one in (plain.runner, runner, draft):
        one.close()


@pytest.fixture(scope="module")
def info() -> RunnerInfo:
    runner = load_runner(config())
    runner.close()
    return runner.info


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 7}, "must have the model's vocabulary, 7; it has"),
        ({"block_size": 16}, "must have the model's block size, 16; it has 32"),
        ({"max_model_len": 1 << 20}, "lower max_model_len to it"),
    ],
)
def test_a_draft_model_that_does_not_go_with_the_model_is_refused(
    info: RunnerInfo, changes: dict[str, int], message: str
) -> None:
    with pytest.raises(SluiceError, match=message) as caught:
        load_draft_runner(config(), dataclasses.replace(info, **changes))  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID, "draft_model_path")


def test_without_a_folder_there_is_no_draft_model(info: RunnerInfo) -> None:
    with pytest.raises(SluiceError, match="needs draft_model_path"):
        load_draft_runner(config(None), info)
    assert load_draft_runner(EngineConfig(model_path=str(MODEL)), info) is None
