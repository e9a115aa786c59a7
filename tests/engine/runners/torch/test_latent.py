"""Latent attention (MLA) on pages that have a token's short vector once for all heads."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from sluice.engine.models.architectures import read_decoder_config
from tests.engine.runners.drive import continuations, prefill, uniform_batch
from tests.engine.runners.family_goldens import read_family
from tests.engine.runners.test_adapters import make_adapter, merge
from tests.engine.runners.torch.loaded import config, load, load_family
from tests.engine.scripted_executor import ScriptedExecutor
from tests.goldens.checkpoints import write_checkpoint

import torch  # isort: skip - `loaded` skips the module where there is none

from sluice.engine.models.kernels import LatentHeads  # isort: skip
from sluice.engine.runners.torch.cache import PageShape, block_bytes, page_shapes  # isort: skip
from sluice.engine.runners.torch.latent import LatentProjection  # isort: skip

pytestmark = pytest.mark.torch
FAMILIES = pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v2_groups", "deepseek_v3"])
V3: dict[str, Any] = {
    "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61, "num_attention_heads": 128,
    "intermediate_size": 18432, "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
}  # fmt: skip
"""The fields of DeepSeek V3's config.json that are not the default."""
PROMPTS = [[(7 * place + 31 * kind) % 100 + 3 for place in range(70 + 20 * kind)] for kind in range(3)]


def test_a_token_of_deepseek_v3_takes_69_kib(tmp_path: Path) -> None:
    """The keys and values of its 128 heads would take 4.8 MiB."""
    (tmp_path / "config.json").write_text(json.dumps(V3))
    shapes = page_shapes(read_decoder_config(tmp_path))
    assert set(shapes) == {PageShape(1, 512 + 64, 0)}
    assert block_bytes(shapes, torch.bfloat16) // 32 == 61 * 576 * 2 == 70_272


@FAMILIES
def test_a_block_holds_no_more_than_its_short_vectors_and_rotated_parts(name: str, tmp_path: Path) -> None:
    runner, golden = load_family(name, tmp_path)
    layers, rank, turned = (
        golden.blueprint.config[each] for each in ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim")
    )
    assert runner.block_bytes == layers * 32 * (rank + turned) * 4
    assert f"(1, {rank + turned}, 0)" in runner.block_identity, "blocks of another layout are not taken for these"


def test_products_with_short_vectors_are_those_with_the_keys_and_values_made_of_them() -> None:
    heads = LatentHeads(num_heads=3, rank=10, plain_dim=6, turned_dim=4, value_dim=5)
    projection = LatentProjection(heads, torch.randn(33, 10))
    query, seen = torch.randn(7, 3, 10), torch.randn(1, 9, 14)
    keys, values = projection.expand(seen, 7)
    expected = torch.einsum("qhd,hkd->qhk", query, keys[0])
    torch.testing.assert_close(projection.absorb(query) @ seen[0].T, expected, atol=1e-4, rtol=1e-4)
    shares = torch.rand(7, 3, 9)
    expected = torch.einsum("qhk,hkv->qhv", shares, values[0])
    torch.testing.assert_close(projection.values(shares @ seen[0, :, :10]), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("num_new", "num_seen", "is_full"), [(1, 32, False), (1, 100_000, False), (8, 4096, False), (512, 512, True),
    (512, 8192, True), (64, 64, True), (64, 4096, False)]
)  # fmt: skip
def test_keys_of_all_heads_are_made_for_prompts_and_not_for_decodes(num_new: int, num_seen: int, is_full: bool) -> None:
    """By the sizes of DeepSeek's models."""
    assert LatentHeads(16, 512, 128, 64, 128).is_shorter_in_full(num_new, num_seen) == is_full


@pytest.mark.parametrize("is_full", [False, True])
@FAMILIES
def test_both_ways_give_the_recorded_tokens(
    name: str, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentHeads, "is_shorter_in_full", lambda *numbers: is_full)
    runner, golden = load_family(name, tmp_path)
    assert continuations(runner, golden) == [case.token_ids for case in golden.cases]


# -- under the executor


def answers(
    folder: Path, predictions: Sequence[Sequence[int]] = ((),) * 6, **fields: Any
) -> tuple[list[list[int]], ScriptedExecutor]:
    """Return the tokens of six visits to the prompts in turn, two at a time. Drafts come from `predictions` too."""
    fields = {"num_blocks": 20, "max_num_batched_tokens": 64, **fields}
    bench = ScriptedExecutor(load(config(folder, **fields)), **fields)  # type: ignore[arg-type]
    for first in range(0, 6, 2):
        for visit in (first, first + 1):
            prediction = list(predictions[visit])
            bench.submit(visit, PROMPTS[visit % 3], max_tokens=24, ignore_eos=True, predicted_token_ids=prediction)
        bench.finish()
    assert not bench.failures
    return [bench.tokens[visit] for visit in range(6)], bench


@FAMILIES
def test_shared_prefixes_tiers_and_drafts_that_are_checked_at_once_change_no_token(name: str, tmp_path: Path) -> None:
    write_checkpoint(read_family(name).blueprint, tmp_path)
    alone, _ = answers(tmp_path, enable_prefix_caching=False)
    shared, bench = answers(tmp_path)
    assert shared == alone
    assert bench.executor.stats().cached_tokens_total > 0
    tiered, bench = answers(tmp_path, num_blocks=9, kv_host_cache_bytes=8 << 20)
    assert tiered == alone
    stats = bench.executor.stats()
    assert stats.kv_tiers is not None
    assert stats.kv_tiers.restored_tokens_total > 0
    half_wrong = [[token if place < 12 else 3 + token % 7 for place, token in enumerate(each)] for each in alone]
    drafted, bench = answers(tmp_path, half_wrong, speculation="ngram")
    assert drafted == alone
    stats = bench.executor.stats()
    assert 0 < stats.accepted_tokens_total < stats.draft_tokens_total


# -- LoRA adapters

MODULES = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def adapted(folder: Path, adapters: dict[str, Path], names: list[str]) -> list[list[int]]:
    """Return the tokens of the prompts for each adapter of `names`, which run together."""
    fields: dict[str, Any] = {"enable_lora": bool(adapters), "lora_modules": {k: str(v) for k, v in adapters.items()}}
    limits = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "lora_modules": fields["lora_modules"]}
    bench = ScriptedExecutor(load(config(folder, num_blocks=60, **fields)), **limits)  # type: ignore[arg-type]
    jobs = [(name, prompt) for name in names for prompt in PROMPTS]
    for stream_id, (name, prompt) in enumerate(jobs):
        bench.submit(stream_id, prompt, adapter=name, max_tokens=12, ignore_eos=True)
    bench.finish()
    assert not bench.failures
    return [bench.tokens[stream_id] for stream_id in range(len(jobs))]


@pytest.mark.parametrize("is_full", [False, True])
@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_adapters_equal_their_merged_weights_either_way(
    name: str, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentHeads, "is_shorter_in_full", lambda *numbers: is_full)
    base = tmp_path / "base"
    write_checkpoint(read_family(name).blueprint, base)
    adapters = {
        each: make_adapter(base, tmp_path / each, seed, modules=MODULES) for seed, each in enumerate(("one", "two"))
    }
    stored = load_file(adapters["one"] / "adapter_model.safetensors")
    assert any("kv_b_proj" in each for each in stored)
    expected = adapted(base, {}, [""])
    for each, folder in adapters.items():
        expected += adapted(merge(base, folder, tmp_path / f"{each} merged"), {}, [""])
    assert len({tuple(each) for each in expected}) == len(expected)
    assert adapted(base, adapters, ["", "one", "two"]) == expected


@pytest.mark.parametrize("is_full", [False, True])
def test_an_adapter_whose_products_overflow_reaches_no_other_token(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LatentHeads, "is_shorter_in_full", lambda *numbers: is_full)
    base = tmp_path / "base"
    write_checkpoint(read_family("deepseek_v3").blueprint, base)
    runner = load(config(base, enable_lora=True))
    runner.read_adapter(1, "huge", make_adapter(base, tmp_path / "huge", 2, scale=3e37, modules=MODULES))()
    batch = uniform_batch(3, num_new=5, num_past=0)
    plain = runner.run(batch).read().copy()
    rows = runner.run(replace(batch, adapters=np.repeat(np.array([0, 1, 0], np.int32), 5))).read()
    assert not np.isfinite(rows[1]).any()
    np.testing.assert_allclose(rows[[0, 2]], plain[[0, 2]], atol=1e-4)


def test_the_absorbed_projection_is_not_in_8_bits(tmp_path: Path) -> None:
    runner, golden = load_family("deepseek_v3", tmp_path, quantization="fp8")
    prefill(runner, golden.cases[-1].prompt_token_ids, [0])
    scaled = {each for names, matrix in runner._model._weights._scaled.items() if matrix is not None for each in names}
    assert not any("kv_b_proj" in each for each in scaled)
