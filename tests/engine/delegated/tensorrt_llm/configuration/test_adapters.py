"""LoRA adapters, by folder and by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from sluice.errors import SluiceError
from tests.engine.delegated.tensorrt_llm.configuration.conftest import Plan
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_3, ONLY_1_4
from tests.stand_ins.model_folders import make_adapter as make_weights


def make_adapter(folder: Path, rank: Any = 8, modules: Any = ("q_proj", "v_proj"), **more: Any) -> Path:
    folder.mkdir(parents=True)
    told = {"r": rank, "target_modules": list(modules) if isinstance(modules, tuple) else modules, **more}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    (folder / "adapter_model.safetensors").touch()
    return folder


def test_one_adapter(plan: Plan, tmp_path: Path) -> None:
    adapter = make_adapter(tmp_path / "sql", rank=16)
    planned = plan(lora_modules={"sql": str(adapter)})
    assert planned.adapters == {"sql": str(adapter)}
    config = planned.arguments["lora_config"]
    assert (config.lora_dir, config.max_lora_rank, config.lora_target_modules) == ([str(adapter)], 16, [])
    assert planned.arguments["enable_lora"] is True


def test_several_adapters_by_folder(plan: Plan, tmp_path: Path) -> None:
    make_adapter(tmp_path / "all" / "a", rank=8)
    make_adapter(tmp_path / "all" / "b", rank=32, modules=("o_proj", "q_proj"), rank_pattern={"x": 64})
    single = make_adapter(tmp_path / "c", rank=4)
    planned = plan(settings={"lora_dir": f"{tmp_path / 'all'},{single}", "lora_cache_gpu_memory_fraction": "0.1"})
    assert sorted(planned.adapters) == ["a", "b", "c"]
    config = planned.arguments["lora_config"]
    assert config.max_lora_rank == 64
    assert config.lora_target_modules == ["attn_q", "attn_v", "attn_dense"]
    assert planned.arguments["peft_cache_config"].device_cache_percent == 0.1


def test_adapters_that_cannot_be_used(plan: Plan, tmp_path: Path) -> None:
    good = make_adapter(tmp_path / "good", rank=16)
    pattern = make_adapter(tmp_path / "pattern", modules="all-linear")
    no_rank = make_adapter(tmp_path / "no_rank", rank=None)
    empty = make_adapter(tmp_path / "empty")
    (empty / "adapter_model.safetensors").unlink()
    broken = make_adapter(tmp_path / "broken")
    (broken / "adapter_config.json").write_text("{")
    for fields, message in (
        ({"lora_modules": {"x": str(tmp_path / "absent")}}, "LoRA adapter x: .*absent has no adapter_config.json"),
        ({"lora_modules": {"x": str(empty)}}, "LoRA adapter x: .* has no weights"),
        ({"lora_modules": {"x": str(broken)}}, "is not a JSON object"),
        ({"lora_modules": {"x": str(no_rank)}}, "r must be a whole number of 1 or more, got None"),
        ({"lora_modules": {"x": str(good), "y": str(pattern)}}, "LoRA adapter y: it changes modules by a pattern"),
        ({"settings": {"lora_dir": str(tmp_path / "absent")}}, "there is no folder"),
        ({"settings": {"lora_dir": str(tmp_path / "good" / "..")}, "lora_modules": {"good": "/g"}}, "two adapters"),
        (
            {"settings": {"max_lora_rank": "8"}, "lora_modules": {"x": str(good)}},
            "max_lora_rank must be at least 16, the rank of adapter x, got 8",
        ),
    ):
        with pytest.raises(SluiceError, match=message):
            plan(**fields)


def test_room_for_adapters_that_come_at_run_time(plan: Plan, tmp_path: Path) -> None:
    config = plan(enable_lora=True).arguments["lora_config"]
    dense = ["attn_dense", "attn_k", "attn_q", "attn_v", "mlp_4h_to_h", "mlp_gate", "mlp_h_to_4h"]
    assert (config.max_lora_rank, config.lora_target_modules) == (64, dense)
    large = make_weights(tmp_path / "large", rank=128, modules=("w1",))
    config = plan(enable_lora=True, lora_modules={"x": large}).arguments["lora_config"]
    assert (config.max_lora_rank, config.lora_target_modules) == (128, sorted([*dense, "moe_h_to_4h"]))
    given = {"max_lora_rank": "8", "lora_config.lora_target_modules": '["attn_q"]'}
    config = plan(enable_lora=True, settings=given).arguments["lora_config"]
    assert (config.max_lora_rank, config.lora_target_modules) == (8, ["attn_q"])
    with pytest.raises(SluiceError, match="LoRA adapter y: it changes attn_v, and the model was started with room for"):
        plan(enable_lora=True, settings=given, lora_modules={"y": make_weights(tmp_path / "y")})


@ONLY_1_4
def test_sleep_keeps_a_copy_of_the_weights(plan: Plan) -> None:
    assert plan().arguments.get("sleep_config") is None
    assert plan(enable_sleep_mode=True).arguments["sleep_config"].restore_modes == {}
    lost = {"sleep_config.restore_modes": '{"kv_cache": "NONE", "model_weights": "NONE"}'}
    with pytest.raises(SluiceError, match=r"sleep_config\.restore_modes must be CPU or PINNED for model_weights"):
        plan(settings=lost)


@ONLY_1_3
def test_a_version_that_gives_no_memory_back_says_so(plan: Plan) -> None:
    assert any("sleeps at level 0 alone" in note for note in plan(enable_sleep_mode=True).notes)
