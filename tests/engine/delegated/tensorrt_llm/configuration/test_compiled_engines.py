"""Compiled engines, whose limits are built in."""

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import Speculation
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.configuration.conftest import Plan
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2, ONLY_1_3
from tests.stand_ins.model_folders import BUILT, make_compiled_engine


@ONLY_1_2
def test_an_engine_keeps_its_limits(plan: Plan, compiled_engine: Path) -> None:
    planned = plan(compiled_engine, max_num_seqs=16, max_num_batched_tokens=4096, max_model_len=4096)
    assert planned.llm_class is import_module("tensorrt_llm._tensorrt_engine").LLM
    assert (planned.max_num_seqs, planned.max_num_batched_tokens) == (BUILT["max_batch_size"], BUILT["max_num_tokens"])
    assert (planned.max_model_len, planned.max_beam_width) == (BUILT["max_seq_len"], BUILT["max_beam_width"])
    assert {"max_seq_len", "max_input_len", "max_beam_width"}.isdisjoint(planned.arguments)
    assert planned.notes == (
        "max_num_seqs 16 is more than the engine was compiled for; 8 holds",
        "max_num_batched_tokens 4096 is more than the engine was compiled for; 1024 holds",
        "max_model_len 4096 is more than the engine was compiled for; 768 holds",
    )
    assert plan(compiled_engine, max_model_len=100).max_model_len == 100


@ONLY_1_2
def test_an_engine_s_blocks_and_chunks_are_built_in(plan: Plan, tmp_path: Path) -> None:
    engine = make_compiled_engine(
        tmp_path / "e", plugin_config={"tokens_per_block": 64, "use_paged_context_fmha": True}
    )
    planned = plan(engine, num_blocks=2)
    assert (planned.tokens_per_block, planned.arguments["kv_cache_config"].max_tokens) == (64, 128)
    assert planned.arguments["enable_chunked_prefill"] is True
    plain = make_compiled_engine(tmp_path / "plain", plugin_config={"use_paged_context_fmha": False})
    assert "enable_chunked_prefill" not in plan(plain).arguments
    with pytest.raises(SluiceError, match="without paged context FMHA"):
        plan(plain, settings={"enable_chunked_context": "true"})


@ONLY_1_2
def test_an_engine_s_parallel_sizes_are_built_in(plan: Plan, tmp_path: Path) -> None:
    engine = make_compiled_engine(tmp_path / "engine")
    config = json.loads((engine / "config.json").read_text())
    config["pretrained_config"]["mapping"] = {"world_size": 2, "tp_size": 2, "pp_size": 1}
    (engine / "config.json").write_text(json.dumps(config))
    assert plan(engine).num_gpus == plan(engine, tensor_parallel_size=2).num_gpus == 2
    with pytest.raises(SluiceError, match=r"tensor_parallel_size must be 1 or 2, what .* was made for; got 4"):
        plan(engine, tensor_parallel_size=4)


@ONLY_1_2
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype must be auto with a compiled engine"),
        ({"settings": {"cuda_graphs": "off"}}, "only the PyTorch backend has the argument cuda_graph_config"),
        ({"speculation": Speculation.NGRAM}, "compiled engines speculate by Eagle, Lookahead, Medusa only, got NGram"),
        ({"quantization": "fp8"}, "quantization fp8 cannot be had"),
        ({"settings": {"backend": "pytorch"}}, "backend must be tensorrt for a tensorrt llm engine"),
        ({"lora_modules": {"a": "/a"}}, "was compiled without LoRA"),
        ({"settings": {"guided_decoding_backend": "llguidance"}}, "must be xgrammar with a compiled engine"),
    ],
)
def test_what_an_engine_cannot_do(plan: Plan, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    engine = make_compiled_engine(tmp_path / "engine", plugin_config={"lora_plugin": None})
    with pytest.raises(SluiceError, match=message):
        plan(engine, **fields)


@ONLY_1_2
def test_an_engine_s_own_settings(plan: Plan, compiled_engine: Path) -> None:
    planned = plan(
        compiled_engine,
        settings={
            "gpt_model_type": "V1",
            "scheduler_config.dynamic_batch_config.enable_batch_size_tuning": "false",
            "multi_block_mode": "false",
            "decoding_mode": "lookahead",
            "lookahead_window_size": "7",
            "normalize_log_probs": "true",
        },
    )
    arguments = planned.arguments
    assert arguments["batching_type"].name == "STATIC" and arguments["normalize_log_probs"] is True
    dynamic = arguments["scheduler_config"].dynamic_batch_config
    assert (dynamic.enable_batch_size_tuning, dynamic.dynamic_batch_moving_average_window) == (False, 128)
    assert arguments["extended_runtime_perf_knob_config"].multi_block_mode is False
    assert arguments["speculative_config"].max_window_size == 7


@ONLY_1_3
def test_compiled_engines_end_with_1_2(plan: Plan, compiled_engine: Path) -> None:
    with pytest.raises(SluiceError, match=r"compiled engines end with 1\.2\.x") as refused:
        plan(compiled_engine)
    assert refused.value.code is ErrorCode.UNIMPLEMENTED
