"""Speculation, from settings to the library's classes."""

import warnings
from pathlib import Path
from typing import Any

import pytest

from sluice.engine.config import EngineConfig, Runtime, Speculation
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.parameters import apply_parameters
from tests.engine.delegated.tensorrt_llm.configuration.conftest import Plan
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_4

TEMPLATE = """\
gpt_model_type=inflight_fused_batching
gpt_model_path=/engines/1-gpu
max_beam_width=1
batch_scheduler_policy=guaranteed_no_evict
max_tokens_in_paged_kv_cache=2560
max_attention_window_size=2560
sink_token_length=0
kv_cache_free_gpu_mem_fraction=0.9
kv_cache_host_memory_bytes=0
kv_cache_onboard_blocks=true
enable_kv_cache_reuse=false
enable_trt_overlap=false
exclude_input_in_output=true
cancellation_check_period_ms=100
stats_check_period_ms=100
recv_poll_period_ms=0
iter_stats_max_iterations=1000
request_stats_max_iterations=0
normalize_log_probs=true
enable_chunked_context=false
gpu_device_ids=0
participant_ids=0
num_nodes=1
gpu_weights_percent=1.0
decoding_mode=top_k_top_p
medusa_choices={0}, {0, 0}
eagle_choices={0}, {0, 0}
lookahead_window_size=4
lookahead_ngram_size=3
lookahead_verification_set_size=4
lora_cache_optimal_adapter_size=8
lora_cache_max_adapter_size=64
lora_cache_gpu_memory_fraction=0.05
lora_cache_host_memory_bytes=1073741824
lora_prefetch_dir=/loras
executor_worker_path=/opt/tritonserver/backends/tensorrtllm/trtllmExecutorWorker
multi_block_mode=true
enable_context_fmha_fp32_acc=true
cuda_graph_mode=false
cuda_graph_cache_size=0
speculative_decoding_fast_logits=false
guided_decoding_backend=none
xgrammar_tokenizer_info_path=/info.json
FORCE_CPU_ONLY_INPUT_TENSORS=no"""
"""The parameters of tensorrt_llm's config.pbtxt, as fill_template.py leaves them with every place filled."""


def test_n_gram(plan: Plan) -> None:
    settings = {"speculative_max_draft_len": "8"}
    by_setting = plan(speculation=Speculation.NGRAM, settings=settings).arguments["speculative_config"]
    assert by_setting.max_draft_len == 8
    config = plan(speculation=Speculation.NGRAM, num_speculative_tokens=6).arguments["speculative_config"]
    assert type(config).__name__ == "NGramDecodingConfig"
    assert (config.max_draft_len, config.max_matching_ngram_size) == (6, 4)


def test_a_draft_model_is_named_as_the_version_names_it(plan: Plan, flavour: str) -> None:
    planned = plan(speculation=Speculation.DRAFT_MODEL, draft_model_path="/draft")
    config = planned.arguments["speculative_config"]
    assert type(config).__name__ == "DraftTargetDecodingConfig"
    assert (config.speculative_model if flavour == "1.3.0" else config.speculative_model_dir) == "/draft"
    with pytest.raises(SluiceError, match="draft_model_path must be given"):
        plan(speculation=Speculation.DRAFT_MODEL)


@pytest.mark.parametrize(
    ("kind", "settings", "fields"),
    [
        ("Eagle", {"speculative_model": "/e"}, {"max_draft_len": 4}),
        ("MTP", {"speculative_config.num_nextn_predict_layers": "2"}, {"num_nextn_predict_layers": 2}),
        ("MTP", {"num_speculative_tokens": "3"}, {"num_nextn_predict_layers": 3}),
        ("AUTO", {}, {"max_draft_len": 4}),
        ("NGram", {"speculative_config.is_keep_all": "false"}, {"is_keep_all": False}),
    ],
)
def test_each_kind_of_speculation(plan: Plan, kind: str, settings: dict[str, str], fields: dict[str, Any]) -> None:
    config = plan(settings={"speculative_decoding_type": kind, **settings}).arguments["speculative_config"]
    assert config.decoding_type == kind
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize("kind", ["Eagle3", "PARD", "SA"])
def test_kinds_of_speculation_that_1_3_brought(plan: Plan, flavour: str, kind: str) -> None:
    settings = {"speculative_decoding_type": kind, "speculative_max_draft_len": "3"}
    if flavour == "1.3.0":
        assert plan(settings=settings).arguments["speculative_config"].max_draft_len == 3
        return
    with pytest.raises(SluiceError, match=rf"has no speculation of type {kind}; it has AUTO, ") as no:
        plan(settings=settings)
    assert no.value.code is ErrorCode.UNIMPLEMENTED


@ONLY_1_4
@pytest.mark.parametrize(
    ("kind", "more", "fields"),
    [
        ("DFlash", {"target_layer_ids": "[1, 2]"}, {"target_layer_ids": [1, 2], "max_draft_len": 4}),
        ("dspark", {"markov_rank": "8"}, {"markov_rank": 8, "max_draft_len": 4}),
        ("User_Provided", {}, {"max_draft_len": 4}),
        ("SaveState", {"output_directory": "/states"}, {"output_directory": "/states", "max_draft_len": None}),
        ("MTP", {"num_nextn_predict_layers": "2"}, {"max_draft_len": 2, "num_nextn_predict_layers": None}),
    ],
)
def test_kinds_of_speculation_are_those_of_the_library(
    plan: Plan, kind: str, more: dict[str, str], fields: dict[str, Any]
) -> None:
    settings = {f"speculative_config.{name}": text for name, text in {"decoding_type": kind, **more}.items()}
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        config = plan(settings=settings).arguments["speculative_config"]
        assert config.decoding_type.lower() == kind.lower()
        assert {name: getattr(config, name) for name in fields} == fields


def test_raw_speculation_may_be_spelled_as_in_files(plan: Plan) -> None:
    raw = {"speculative_config": {"decoding_type": "Draft_Target", "speculative_model_dir": "/d", "max_draft_len": 2}}
    assert type(plan(llm_arguments=raw).arguments["speculative_config"]).__name__ == "DraftTargetDecodingConfig"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoding_mode": "medusa"}, "only compiled engines have speculation of type Medusa"),
        ({"speculative_config.is_keep_all": "true"}, "give speculative_config.decoding_type too"),
        (
            {"speculative_decoding_type": "NGram", "speculative_config.relaxed_topk": "2"},
            "no argument speculative_config.relaxed_topk",
        ),
        (
            {
                "speculative_decoding_type": "MTP",
                "speculative_config.num_nextn_predict_layers": "1",
                "num_speculative_tokens": "2",
            },
            "num_speculative_tokens must be left out beside speculative_config.num_nextn_predict_layers",
        ),
    ],
)
def test_speculation_that_cannot_be(plan: Plan, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SluiceError, match=message):
        plan(settings=settings)


def test_sampling_without_drafts_is_no_speculation(plan: Plan) -> None:
    assert "speculative_config" not in plan(settings={"decoding_mode": "top_k_top_p"}).arguments


@pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0", "1.4.0"], indirect=True)
def test_nvidia_s_template_with_every_place_filled_starts(plan: Plan, checkpoint: Path) -> None:
    given = EngineConfig(model_path=str(checkpoint), runtime=Runtime.TENSORRT_LLM)
    texts = dict(line.split("=", 1) for line in TEMPLATE.split("\n"))
    filled, notes = apply_parameters(given, "m", texts)
    planned = plan(settings=filled.runtime_settings)
    assert planned.arguments["peft_cache_config"].optimal_adapter_size == 8
    assert "eagle_choices: decoding_mode top_k_top_p drafts no tokens" in notes
