"""The table of settings: the values of texts, and the errors of those that cannot be used."""

from typing import Any

import pytest

from engine.delegated.tensorrt_llm.configuration.catalogue import ENGINES, PYTORCH, SETTINGS
from sluice.errors import ErrorCode, SluiceError

TENSORRTLLM_BACKEND = """
batching_strategy gpt_model_type engine_dir gpt_model_path encoder_engine_dir encoder_model_path
max_beam_width batch_scheduler_policy max_tokens_in_paged_kv_cache kv_cache_free_gpu_mem_fraction
cross_kv_cache_fraction kv_cache_host_memory_bytes kv_cache_onboard_blocks enable_kv_cache_reuse
max_attention_window_size sink_token_length enable_chunked_context exclude_input_in_output normalize_log_probs
cancellation_check_period_ms stats_check_period_ms iter_stats_max_iterations request_stats_max_iterations
recv_poll_period_ms gpu_device_ids participant_ids num_nodes decoding_mode medusa_choices eagle_choices
lookahead_window_size lookahead_ngram_size lookahead_verification_set_size lora_cache_optimal_adapter_size
lora_cache_max_adapter_size lora_cache_gpu_memory_fraction lora_cache_host_memory_bytes lora_prefetch_dir
gpu_weights_percent multi_block_mode enable_context_fmha_fp32_acc cuda_graph_mode cuda_graph_cache_size
speculative_decoding_fast_logits guided_decoding_backend tokenizer_dir xgrammar_tokenizer_info_path
executor_worker_path FORCE_CPU_ONLY_INPUT_TENSORS max_num_sequences enable_trt_overlap
"""
"""Parameters of NVIDIA's Triton backend, by the names in its templates and in the files made of them."""


@pytest.mark.parametrize("name", TENSORRTLLM_BACKEND.split())
def test_parameters_of_nvidia_s_backend_are_known(name: str) -> None:
    assert name in SETTINGS


def test_every_row_is_found_by_its_names() -> None:
    rows = [row for group in SETTINGS.groups.values() for row in group]
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert all(SETTINGS[name] is row for name in (row.name, *row.aliases))
        assert row.help or row.no_effect, row.name
        assert row.backend in ("", ENGINES, PYTORCH), row.name
        assert not row.no_effect or not row.target, row.name


@pytest.mark.parametrize(
    ("name", "text", "target", "value"),
    [
        ("kv_cache_free_gpu_mem_fraction", "0.85", "kv_cache_config.free_gpu_memory_fraction", 0.85),
        ("max_tokens_in_paged_kv_cache", "2560", "kv_cache_config.max_tokens", 2560),
        ("kv_cache_host_memory_bytes", "4Gi", "kv_cache_config.host_cache_size", 4 << 30),
        ("kv_cache_host_memory_bytes", "1.5GB", "kv_cache_config.host_cache_size", 1_500_000_000),
        ("enable_kv_cache_reuse", "True", "kv_cache_config.enable_block_reuse", True),
        ("max_attention_window_size", "2048,4096", "kv_cache_config.max_attention_window", [2048, 4096]),
        ("kv_cache_dtype", "FP8", "kv_cache_config.dtype", "fp8"),
        ("batch_scheduler_policy", "max_utilization", "scheduler_config.capacity_scheduler_policy", "MAX_UTILIZATION"),
        ("scheduler_policy", "static_batch", "scheduler_config.capacity_scheduler_policy", "STATIC_BATCH"),
        ("context_chunking_policy", "equal_progress", "scheduler_config.context_chunking_policy", "EQUAL_PROGRESS"),
        ("gpt_model_type", "inflight_fused_batching", "batching_type", "INFLIGHT"),
        ("gpt_model_type", "V1", "batching_type", "STATIC"),
        ("cuda_graphs", "off", "cuda_graph_config", None),
        ("enforce_eager", "true", "cuda_graph_config", None),
        ("enforce_eager", "false", "cuda_graph_config", {}),
        ("cuda_graph_batch_sizes", "[1, 2, 4]", "cuda_graph_config.batch_sizes", [1, 2, 4]),
        ("enable_overlap_scheduler", "false", "disable_overlap_scheduler", True),
        ("orchestrator_type", "mpi", "orchestrator_type", None),
        ("orchestrator_type", "ray", "orchestrator_type", "ray"),
        ("dtype", "bf16", "dtype", "bfloat16"),
        ("sampler_type", "trtllmsampler", "sampler_type", "TRTLLMSampler"),
        ("lora_cache_gpu_memory_fraction", "0.1", "peft_cache_config.device_cache_percent", 0.1),
        ("medusa_choices", "{0, 0, 0}, {0, 1}", "speculative_config.medusa_choices", [[0, 0, 0], [0, 1]]),
        ("eagle_choices", "[[0], [0, 1]]", "speculative_config.eagle_choices", [[0], [0, 1]]),
        ("eagle_choices", "{{0}, {1}}", "speculative_config.eagle_choices", [[0], [1]]),
        ("decoding_mode", "medusa", "speculative_config.decoding_type", "Medusa"),
        ("decoding_mode", "top_k_top_p", "speculative_config.decoding_type", "none"),
        ("speculative_decoding_type", "draft_target", "speculative_config.decoding_type", "DraftTarget"),
        ("num_speculative_tokens", "5", "speculative_config.max_draft_len", 5),
        ("guided_decoding_backend", "none", "guided_decoding_backend", None),
        ("model_kwargs", '{"num_hidden_layers": 2}', "model_kwargs", {"num_hidden_layers": 2}),
        ("stall_timeout_s", "30", "stall_timeout_s", 30.0),
        ("lora_dir", "/a, /b", "lora_dir", ["/a", "/b"]),
    ],
)
def test_a_text_becomes_a_value_of_its_target(name: str, text: str, target: str, value: Any) -> None:
    values = SETTINGS.check({name: text})
    assert values == {target: value}
    assert type(values[target]) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("max_batch_size", "0", "a whole number of 1 or more"),
        ("max_batch_size", "8.5", "a whole number of 1 or more"),
        ("free_gpu_memory_fraction", "1.5", "a number from 0 to 1"),
        ("free_gpu_memory_fraction", "nan", "a number from 0 to 1"),
        ("enable_block_reuse", "maybe", "true or false"),
        ("batch_scheduler_policy", "fcfs", "one of guaranteed_no_evict, max_utilization, static_batch"),
        ("host_cache_size", "lots", "a number of bytes, as 1073741824 or 1Gi"),
        ("max_attention_window", "2048,,", "values with commas between"),
        ("max_attention_window", "2048,x", "values with commas between, each a whole number of 1 or more"),
        ("medusa_choices", "{0, 1", r"paths as {0, 0}, {0, 1}"),
        ("medusa_choices", "{}", r"paths as {0, 0}, {0, 1}"),
        ("model_kwargs", "[1]", "a JSON object"),
        ("orchestrator_type", "slurm", "mpi or one of rpc, ray"),
        ("stall_timeout_s", "-1", "a number of 0 or more"),
    ],
)
def test_a_wrong_text_is_named_with_what_it_must_be(name: str, text: str, expected: str) -> None:
    with pytest.raises(SluiceError) as refused:
        SETTINGS.check({name: text})
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, name)
    assert refused.value.message.startswith(f"{name} must be {expected}")
    assert refused.value.message.endswith(f"got {text!r}")


def test_an_unknown_name_is_refused_with_those_that_are_near() -> None:
    with pytest.raises(SluiceError, match=r"knows no setting 'max_batchsize' \(did you mean max_batch_size") as refused:
        SETTINGS.check({"max_batchsize": "4"})
    assert refused.value.param == "max_batchsize"
    with pytest.raises(SluiceError, match=r"knows no setting 'zzzz'; docs/tensorrt-llm.md lists them"):
        SETTINGS.check({"zzzz": "4"})


@pytest.mark.parametrize("text", ["", "  ", "${max_beam_width}"])
def test_what_nobody_filled_in_is_left_out(text: str) -> None:
    assert SETTINGS.check({"max_beam_width": text}) == {}


def test_two_names_for_one_target_must_agree() -> None:
    assert SETTINGS.check({"tp_size": "2", "tensor_parallel_size": "2"}) == {"tensor_parallel_size": 2}
    with pytest.raises(SluiceError, match="both set tensor_parallel_size; give one of them"):
        SETTINGS.check({"tp_size": "2", "tensor_parallel_size": "4"})


def test_parameters_without_a_meaning_here_are_noted() -> None:
    texts = {"recv_poll_period_ms": "0", "max_beam_width": "2", "gpu_device_ids": "${gpu_device_ids}"}
    assert SETTINGS.check(texts) == {"max_beam_width": 2}
    assert SETTINGS.notes(texts) == [
        "recv_poll_period_ms has no effect: the LLM API is told of each request and cancel at once"
    ]
