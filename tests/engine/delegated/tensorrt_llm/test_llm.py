"""The blocks that TensorRT-LLM reserves, and which of them it shares; and what its front tells of lost workers."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest
from packaging.version import Version

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.admission import BlockSharing
from sluice.engine.delegated.tensorrt_llm.blocks import blocks_to_completion
from sluice.engine.delegated.tensorrt_llm.configuration.plan import LlmPlan
from sluice.engine.delegated.tensorrt_llm.folder import LlmFolder
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.engine.delegated.tensorrt_llm.llm import TensorRtLlm
from sluice.engine.delegated.tensorrt_llm.loaded import worker_loss
from sluice.engine.delegated.tensorrt_llm.samplers import ModelSampler, SamplerKind
from sluice.engine.model_folder import ModelFormat
from sluice.engine.types import GenerateRequest, SamplingParams
from tests.waiting import until


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "beams", "blocks"),
    [
        (1, 1, 1, 1),
        (31, 1, 1, 1),
        (32, 1, 1, 2),  # the last token counts, though it is never fed back
        (32, 32, 1, 2),
        (33, 32, 1, 3),
        (70, 30, 1, 4),
        (70, 30, 3, 2 + 2 * 3),  # whole blocks of the prompt are shared
        (64, 32, 4, 2 + 4),
        (5, 20, 4, 4),
    ],
)
def test_the_reservation_is_the_references(prompt: int, max_tokens: int, beams: int, blocks: int) -> None:
    assert blocks_to_completion(prompt, max_tokens, beams, 32) == blocks


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "blocks"), [(20, 10, 1), (100, 20, 4), (100, 60, 5), (1000, 20, 5), (20, 1000, 5)]
)
def test_of_a_window_no_more_than_a_block_beyond_it_is_reserved(prompt: int, max_tokens: int, blocks: int) -> None:
    assert blocks_to_completion(prompt, max_tokens, 1, 32, 128 + 32) == blocks


def llm(version: str = "1.3.0", cache: dict[str, Any] | None = None, **arguments: Any) -> TensorRtLlm:
    """Return the adapter over a library that does nothing."""
    kv_cache = SimpleNamespace(**{"enable_block_reuse": True, "max_attention_window": None, **(cache or {})})
    plan = LlmPlan(
        SimpleNamespace, {"kv_cache_config": kv_cache, **arguments}, (), 8, 2048, 4096, 1, tokens_per_block=32,
        adapters={}, sampler=ModelSampler(SamplerKind.TORCH, Version(version)),
    )  # fmt: skip
    folder = LlmFolder(Path("/m"), ModelFormat.HUGGINGFACE, "llama", "bfloat16", 1000, (2,), 4096)
    library = TensorRtLlmLibrary(Version(version), ModuleType("llmapi"))
    made = SimpleNamespace(generate_async=lambda cache_salt: None)
    return TensorRtLlm(made, plan, library, folder, EngineConfig(model_path="/m"))


@pytest.mark.parametrize(
    ("version", "sharing"),
    [
        ("1.2.1", BlockSharing.RUNNING),
        ("1.3.0rc4", BlockSharing.RUNNING),
        ("1.3.0rc5", BlockSharing.AWAITED),
        ("1.3.0", BlockSharing.AWAITED),
        ("1.4.0rc1", BlockSharing.AWAITED),
    ],
)
def test_a_candidate_has_credit_for_shared_blocks_from_1_3_0rc5_on(version: str, sharing: BlockSharing) -> None:
    assert llm(version).sharing is sharing


def test_nothing_is_shared_without_reuse_in_windows_and_by_ranks_with_caches_of_their_own() -> None:
    assert llm(cache={"enable_block_reuse": False}).sharing is BlockSharing.NONE
    assert llm(cache={"max_attention_window": [512]}).sharing is BlockSharing.NONE
    assert llm(cache={"max_attention_window": [512, 4096]}).sharing is BlockSharing.AWAITED
    assert llm(enable_attention_dp=True).sharing is BlockSharing.NONE


def test_none_comes_early_where_chunks_and_reuse_could_lock_up() -> None:
    assert llm().takes_early
    assert not llm(enable_chunked_prefill=True).takes_early
    assert llm(cache={"enable_block_reuse": False}, enable_chunked_prefill=True).takes_early


def request(*prompt: int, **sampling: Any) -> GenerateRequest:
    params = SamplingParams(**{"max_tokens": 5, "temperature": 0.0, **sampling})
    return GenerateRequest(request_id="r", prompt_token_ids=list(prompt), sampling=params)


def test_prompts_that_are_computed_whole_and_beams_share_nothing() -> None:
    assert llm().prompt_chain(request(1)) is not None
    assert llm().prompt_chain(request(1, prompt_logprobs=1)) is None
    assert llm().prompt_chain(request(1, beam_width=2)) is None


def test_a_prompt_longer_than_the_window_takes_no_more_than_it() -> None:
    windowed = llm(cache={"max_attention_window": [128]})
    assert windowed.worst_case_blocks(request(*[1] * 3000)) == 5


@pytest.mark.slow  # the stand-in starts a rank
async def test_a_dead_worker_is_known_without_another_request(
    import_stand_in: Callable[..., ModuleType], open_llm: Callable[..., Any]
) -> None:
    llm = open_llm(import_stand_in(RANK_DEATH="hang"), tensor_parallel_size=2)
    assert worker_loss(llm) is None
    [rank] = [each for each in psutil.Process().children() if each.cmdline()[-1:] == ["stand-in-rank=1"]]
    rank.kill()
    await until(lambda: worker_loss(llm) is not None)
    assert worker_loss(llm) == "The executor has failed: rank 1 is gone"


def test_a_front_that_tells_nothing_has_lost_nobody() -> None:
    assert worker_loss(object()) is None
