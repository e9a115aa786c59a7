"""The effect of each parameter of config.pbtxt on OpenVINO, and of several parameters together."""

from typing import Any

import msgspec
import pytest
from tritonclient.grpc.model_config_pb2 import ModelConfig

from sluice.engine.config import EngineConfig, Runtime, SchedulerPolicy, Speculation, Task
from sluice.errors import SluiceError
from sluice.pipelines.llm import parameters
from sluice.pipelines.llm.executor_parameters import OPENVINO_RULES
from sluice.pipelines.llm.parameters import apply_parameters, excludes_input, parameter_texts
from tests.pipelines.llm.parameter_checks import check_fields, check_fields_and_note, check_refused

GIVEN = EngineConfig(
    model_path="here", runtime=Runtime.OPENVINO, kv_cache_memory_bytes=1 << 30, max_num_seqs=16, num_threads=3
)

OBEYED: list[tuple[str, str, dict[str, Any]]] = [
    ("batch_scheduler_policy", "guaranteed_no_evict", {"scheduler_policy": SchedulerPolicy.GUARANTEED_NO_EVICT}),
    ("batch_scheduler_policy", "max_utilization", {"scheduler_policy": SchedulerPolicy.MAX_UTILIZATION}),
    ("scheduler_policy", "MAX_UTILIZATION", {"scheduler_policy": SchedulerPolicy.MAX_UTILIZATION}),
    ("scheduler_policy", "static_batch", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("gpt_model_type", "V1", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("batching_type", "V1", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("batching_strategy", "V1", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("gpt_model_type", "inflight_fused_batching", {}),
    ("batching_strategy", "inflight_batching", {}),
    ("max_batch_size", "8", {"max_num_seqs": 8}),
    ("max_num_sequences", "9", {"max_num_seqs": 9}),
    ("device", "cpu", {}),
    ("max_num_seqs", "600", {"max_num_seqs": 600, "max_num_batched_tokens": 600}),
    ("max_num_tokens", "8192", {"max_num_batched_tokens": 8192}),
    ("max_num_tokens", "12", {"max_num_batched_tokens": 12, "max_num_seqs": 12}),
    ("max_num_batched_tokens", "100", {"max_num_batched_tokens": 100}),
    ("max_queue_size", "0", {"max_queued_requests": 0}),
    ("max_queued_requests", "7", {"max_queued_requests": 7}),
    ("max_queued_tokens", "7000", {"max_queued_tokens": 7000}),
    ("max_tokens_in_paged_kv_cache", "20000", {"num_blocks": 625, "kv_cache_memory_bytes": None}),
    ("max_tokens_in_paged_kv_cache", "33", {"num_blocks": 2, "kv_cache_memory_bytes": None}),
    ("num_blocks", "12", {"num_blocks": 12, "kv_cache_memory_bytes": None}),
    (
        "kv_cache_free_gpu_mem_fraction",
        "0.5",
        {"kv_cache_memory_fraction": 0.5, "kv_cache_memory_bytes": None},
    ),
    ("gpu_memory_utilization", "0.25", {"kv_cache_memory_fraction": 0.25, "kv_cache_memory_bytes": None}),
    ("enable_kv_cache_reuse", "false", {"enable_prefix_caching": False}),
    ("enable_kv_cache_reuse", "True", {"enable_prefix_caching": True}),
    ("enable_prefix_caching", "0", {"enable_prefix_caching": False}),
    ("enable_chunked_context", "true", {}),
    ("enable_chunked_prefill", "true", {}),
    *[("decoding_mode", mode, {}) for mode in ("auto", "top_k", "top_p", "top_k_top_p")],
    ("max_beam_width", "1", {}),
    ("exclude_input_in_output", "true", {}),
    ("tool_call_parser", "hermes", {}),
    ("reasoning_parser", "none", {}),
    ("kv_cache_host_memory_bytes", "0", {}),
    ("kv_cache_host_memory_bytes", "1000000", {"kv_host_cache_bytes": 1_000_000}),
    ("num_nodes", "1", {}),
    ("tensor_parallel_size", "1", {}),
    ("pipeline_parallel_size", "1", {}),
    ("data_parallel_size", "1", {}),
    ("block_size", "32", {}),
    ("trust_remote_code", "false", {}),
    ("enable_lora", "false", {}),
    ("enable_lora", "true", {"enable_lora": True}),
    ("lora_modules", "sql=/lora", {"lora_modules": {"sql": "/lora"}}),
    ("guided_decoding_backend", "llguidance", {}),
    *[(key, "/models/llama", {}) for key in ("gpt_model_path", "engine_dir", "tokenizer_dir", "model", "tokenizer")],
    ("dtype", "bfloat16", {"dtype": "bf16"}),
    ("dtype", "float32", {"dtype": "f32"}),
    ("dtype", "auto", {"dtype": "auto"}),
    ("quantization", "int8", {"quantization": "int8"}),
    ("kv_cache_dtype", "u8", {"kv_cache_dtype": "u8"}),
    ("max_model_len", "4096", {"max_model_len": 4096}),
    ("max_seq_len", "4096", {"max_model_len": 4096}),
    ("runtime", "openvino", {}),
    ("speculation", "ngram", {"speculation": "ngram"}),
    ("num_speculative_tokens", "6", {"num_speculative_tokens": 6}),
    ("num_threads", "2", {"num_threads": 2}),
    ("task", "embed", {"task": Task.EMBED}),
    (
        "speculative_config",
        '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}',
        {"speculation": Speculation.NGRAM, "num_speculative_tokens": 5},
    ),
]

OBEYED_WITH_A_NOTE: list[tuple[str, str, dict[str, Any], str]] = [
    ("decoding_mode", "lookahead", {"speculation": Speculation.NGRAM}, "answers are the same"),
    ("dtype", "float16", {"dtype": "auto"}, "it is bf16 where the CPU has that"),
    ("dtype", "half", {"dtype": "auto"}, "it is bf16 where the CPU has that"),
    ("kv_cache_dtype", "fp8_e5m2", {"kv_cache_dtype": "u8"}, "u8 holds as many tokens"),
]

VALUES = """
batch_scheduler_policy=fastest max_queue_delay_microseconds=5000 enable_chunked_context=false enable_trt_overlap=true
kv_cache_onboard_blocks=true cross_kv_cache_fraction=0.5 max_attention_window_size=4096 sink_token_length=4
decoding_mode=medusa normalize_log_probs=true lookahead_window_size=4 lookahead_ngram_size=4
lookahead_verification_set_size=4 speculative_decoding_fast_logits=1 guided_decoding_backend=xgrammar
xgrammar_tokenizer_info_path=/x.json tokenizer_type=auto executor_worker_path=/opt/trtllmExecutorWorker
gpu_device_ids=0,1 participant_ids=1 num_nodes=2 gpu_weights_percent=0.5 multi_block_mode=true
enable_context_fmha_fp32_acc=true cuda_graph_mode=true cuda_graph_cache_size=4 FORCE_CPU_ONLY_INPUT_TENSORS=no
cancellation_check_period_ms=100 stats_check_period_ms=100 recv_poll_period_ms=0 iter_stats_max_iterations=1000
request_stats_max_iterations=0 lora_cache_optimal_adapter_size=8 lora_cache_max_adapter_size=64
lora_cache_gpu_memory_fraction=0.05 lora_cache_host_memory_bytes=1 lora_prefetch_dir=/lora lora_dir=/lora
moe_expert_parallel_size=8 tensor_parallel_size=2 pipeline_parallel_size=2 data_parallel_size=2
distributed_executor_backend=mp enforce_eager=true swap_space=4 cpu_offload_gb=4 block_size=16 seed=0
trust_remote_code=true scheduling_policy=fcfs served_model_name=other disable_log_stats=true disable_log_requests=true
enable_metrics=true REPORT_CUSTOM_METRICS=yes quantization=awq unheard_of=x
"""
WITHOUT_EFFECT = dict(each.split("=") for each in VALUES.split()) | {
    "medusa_choices": "{0}",
    "eagle_choices": "{0}",
    "engine_launcher": "mpirun -n 2",
    "speculative_config": '{"method": "eagle"}',
}
"""A value for each parameter that changes nothing here. The words of its note are for people."""

REFUSED: list[tuple[str, str, str]] = [
    ("max_beam_width", "4", "beam search is not offered.*set max_beam_width to 1, got '4'"),
    ("max_beam_width", "two", "must be an integer of at least 0, got 'two'"),
    ("decoding_mode", "beam_search", "beam search is not offered"),
    ("decoding_mode", "magic", "must be auto, top_k, top_p"),
    ("gpt_model_type", "V2", "must be inflight_fused_batching, inflight_batching or V1, got 'V2'"),
    ("max_tokens_in_paged_kv_cache", "0", "must be an integer of at least 1"),
    ("kv_cache_free_gpu_mem_fraction", "1.5", "must be a number above 0 and at most 1"),
    ("kv_cache_free_gpu_mem_fraction", "half", "must be a number above 0 and at most 1"),
    ("enable_kv_cache_reuse", "maybe", "must be true or false, got 'maybe'"),
    ("exclude_input_in_output", "maybe", "must be true or false"),
    ("max_num_seqs", "4097", "must be an integer of at least 1 and at most 4096, got '4097'"),
    ("num_speculative_tokens", "33", "at most 32"),
    ("max_queue_size", "-1", "must be an integer of at least 0"),
    ("encoder_model_path", "/enc", "models with an encoder are not offered"),
    ("encoder_engine_dir", "/enc", "models with an encoder are not offered"),
    ("dtype", "fp4", "must be one of auto, bf16"),
    ("kv_cache_dtype", "int2", "must be one of auto, bf16, f32, u8"),
    ("speculation", "draft_model", "must be one of off, ngram"),
    ("runtime", "cuda", "must be one of auto, openvino, tensorrt_llm, torch, vllm, got 'cuda'"),
    ("speculative_config", "ngram", "must be a JSON object"),
    ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 99}', "from 1 to 32"),
]


@pytest.mark.parametrize(("key", "text", "fields"), OBEYED)
def test_is_obeyed(key: str, text: str, fields: dict[str, Any]) -> None:
    check_fields(GIVEN, key, text, fields)


@pytest.mark.parametrize(("key", "text", "fields", "words"), OBEYED_WITH_A_NOTE)
def test_is_obeyed_with_a_note(key: str, text: str, fields: dict[str, Any], words: str) -> None:
    check_fields_and_note(GIVEN, key, text, fields, words)


@pytest.mark.parametrize(("key", "text"), WITHOUT_EFFECT.items())
def test_has_no_effect_and_a_note(key: str, text: str) -> None:
    check_fields_and_note(GIVEN, key, text, {}, "")


@pytest.mark.parametrize(("key", "text", "words"), REFUSED)
def test_is_refused(key: str, text: str, words: str) -> None:
    check_refused(GIVEN, key, text, words)


def test_every_row_is_tested() -> None:
    tested = {row[0] for row in (*OBEYED, *OBEYED_WITH_A_NOTE, *REFUSED)} | WITHOUT_EFFECT.keys()
    assert OPENVINO_RULES.keys() <= tested


def test_the_bounded_cache_wins_over_the_share() -> None:
    texts = {"kv_cache_free_gpu_mem_fraction": "0.9", "max_tokens_in_paged_kv_cache": "640"}
    config, notes = apply_parameters(GIVEN, "m", texts)
    assert (config.num_blocks, config.kv_cache_memory_fraction) == (20, None)
    assert notes == ["kv_cache_free_gpu_mem_fraction: max_tokens_in_paged_kv_cache decides"]


def test_a_size_of_a_step_that_is_given_is_kept_whatever_the_load() -> None:
    by_load = msgspec.structs.replace(GIVEN, chooses_chunk=True)
    config, _ = apply_parameters(by_load, "m", {"max_num_batched_tokens": "100"})
    assert (config.max_num_batched_tokens, config.chooses_chunk) == (100, False)
    assert apply_parameters(by_load, "m", {"max_num_seqs": "9"})[0].chooses_chunk


def test_v1_has_no_policy_to_choose() -> None:
    texts = {"batch_scheduler_policy": "max_utilization", "gpt_model_type": "V1"}
    config, notes = apply_parameters(GIVEN, "m", texts)
    assert config.scheduler_policy is SchedulerPolicy.STATIC_BATCH
    assert notes == ["batch_scheduler_policy: gpt_model_type decides"]


def test_names_of_one_thing_may_agree_and_not_contradict() -> None:
    texts = {"batch_scheduler_policy": "max_utilization", "scheduler_policy": "max_utilization"}
    assert apply_parameters(GIVEN, "m", texts)[1] == []
    with pytest.raises(SluiceError, match="parameters 'batch_scheduler_policy' and 'scheduler_policy' of model 'm'"):
        apply_parameters(GIVEN, "m", texts | {"scheduler_policy": "static_batch"})


def test_what_nobody_filled_in_is_unset() -> None:
    config = ModelConfig()
    for key, value in {"a": "", "b": "${b}", "c": " ", "max_beam_width": " 1 ", "d": "${x} y"}.items():
        config.parameters[key].string_value = value
    assert parameter_texts(config) == {"max_beam_width": "1", "d": "${x} y"}


@pytest.mark.parametrize(("text", "excludes"), [("true", True), ("false", False), ("${x}", False), (None, False)])
def test_the_default_of_exclude_input_in_output(text: str | None, excludes: bool) -> None:
    config = ModelConfig()
    if text is not None:
        config.parameters["exclude_input_in_output"].string_value = text
    assert excludes_input(config) is excludes


def test_without_parameters_the_command_line_holds() -> None:
    assert apply_parameters(GIVEN, "m", {}) == (GIVEN, [])


def test_a_runtime_without_rules_of_its_own_has_the_shared_ones_and_its_settings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(parameters, "_RULE_FINDERS", {})
    given = msgspec.structs.replace(GIVEN, runtime=Runtime.TENSORRT_LLM)
    texts = {"max_num_seqs": "8", "max_beam_width": "2", "unheard_of": "1"}
    config, notes = apply_parameters(given, "m", texts)
    assert (config.max_num_seqs, config.runtime_settings) == (8, {"max_beam_width": "2"})
    assert notes == ["unheard_of: is unknown and has no effect"]
