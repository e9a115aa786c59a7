"""The settings of vLLM that flags, model.json and config.pbtxt can make: its engine arguments by their own names.

The table has those of 0.32 and 0.33. At load they are compared with the version that is installed (`arguments.py`).
"""

import json
from typing import Any

from sluice.engine.runtime_settings import (
    STALL_SETTING,
    Parse,
    RuntimeSetting,
    SettingsTable,
    boolean,
    none_or,
    number,
    text,
    whole,
)

HELP = "vLLM's engine argument of this name."


def _json_value(value: str) -> Any:
    """Read JSON, and text that is none as it is: vLLM takes both a name and an object in some places."""
    try:
        return json.loads(value)
    except ValueError:
        if value.lstrip()[:1] in ("{", "["):
            raise ValueError("JSON") from None
        return value


def _left_out(reason: str) -> Parse:
    def refuse(value: str) -> Any:
        raise ValueError(f"left out: {reason}")

    return refuse


def _group(parse: Parse, names: str) -> tuple[RuntimeSetting, ...]:
    return tuple(RuntimeSetting(name, name, parse, HELP) for name in names.split())


_BOOLEANS = """
aggregate_engine_logging allow_deprecated_quantization async_scheduling cudagraph_metrics dcp_q_replicate
disable_cascade_attn disable_chunked_mm_input disable_custom_all_reduce disable_hybrid_kv_cache_manager
disable_nccl_for_dp_synchronization disable_sliding_window enable_batch_sharded_sampling enable_chunked_prefill
enable_cumem_allocator enable_dbo enable_ep_weight_filter enable_eplb enable_expert_parallel enable_fault_tolerance
enable_flashinfer_autotune enable_hc_sp enable_layerwise_nvtx_tracing enable_logging_iteration_details enable_lora
enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint enable_mfu_metrics
enable_mixed_moe_lora_format enable_mm_embeds enable_mm_processor_stats enable_moe_shared_loras
enable_nccl_comm_suspend enable_prefix_caching enable_shm_tensor_arena enable_sleep_mode enable_tower_connector_lora
enforce_eager fail_on_environ_validation fully_sharded_loras interleave_mm_strings jit_monitor_verbose
kv_cache_metrics kv_sharing_fast_prefill language_model_only long_prefill_token_threshold_adaptive
mm_device_do_normalize mm_encoder_only numa_bind ray_workers_use_nsight scheduler_reserve_full_isl
skip_mm_profiling skip_tokenizer_init sleep_mode_offload_cudagraph specialize_active_lora swa_bounded_replay
trust_remote_code use_fp64_gumbel use_replayssm use_tqdm_on_load
"""
_INTEGERS = """
block_size cp_kv_cache_interleave_size cpu_distributed_timeout_seconds dbo_decode_token_threshold
dbo_prefill_token_threshold dcp_kv_cache_interleave_size decode_context_parallel_size distributed_timeout_seconds
dp_sync_interval kv_cache_memory_bytes long_prefill_token_threshold mamba_block_size mamba_cache_philox_rounds
master_port max_cpu_loras max_cudagraph_capture_size max_logprobs max_lora_cls_labels max_lora_rank max_loras
max_model_len max_num_active_seqs max_num_batched_tokens max_num_scheduled_tokens max_num_seqs
max_parallel_loading_workers mm_shm_cache_max_object_size_mb nnodes node_rank num_gpu_blocks_override
offload_group_size offload_num_in_group offload_prefetch_step pipeline_parallel_size prefill_context_parallel_size
prefill_schedule_interval prefix_cache_retention_interval prefix_match_unit renderer_num_workers replayssm_buffer_len
safetensors_prefetch_block_size safetensors_prefetch_num_threads seed spec_tokens tensor_parallel_size ubatch_size
"""
_NUMBERS = """
cpu_offload_gb gpu_memory_utilization kv_cache_metrics_sample kv_offloading_size mm_encoder_fp8_scale_save_margin
mm_ipc_gpu_memory_gb mm_processor_cache_gb video_pruning_rate watermark
"""
_WORDS = """
all2all_backend allowed_local_media_path attention_backend code_revision config_format dcp_comm_backend
distributed_executor_backend download_dir dtype expert_placement_strategy gdn_prefill_backend hf_config_path
io_processor_plugin jit_monitor_mode kda_decode_backend kda_prefill_backend kv_cache_dtype kv_offloading_backend
linear_backend load_format lora_dtype mamba_backend mamba_cache_dtype mamba_cache_mode mamba_ssm_cache_dtype
mamba_ssu_algorithm master_addr mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
mm_encoder_fp8_scale_save_path mm_encoder_tp_mode mm_hasher_algorithm mm_processor_cache_type mm_processor_device
mm_tensor_ipc model_impl moe_backend offload_backend performance_mode prefix_caching_hash_algo quantization
revision safetensors_load_strategy scheduler_cls show_hidden_metrics_for_version sleep_mode_backend
sparse_indexer_topk_backend spec_method spec_model tokenizer tokenizer_mode tokenizer_revision
video_pruning_method worker_cls worker_extension_cls
"""
_OBJECTS = """
additional_config allowed_media_domains attention_config compilation_config cpu_offload_params
cudagraph_capture_sizes default_mm_loras device_ids ec_manager_config ec_transfer_config engram_config eplb_config
fault_tolerance_config hf_overrides ignore_patterns ir_op_priority kernel_config kv_cache_dtype_skip_layers
kv_events_config kv_transfer_config limit_mm_per_prompt logging_config lora_target_modules mamba_config
media_io_kwargs mm_processor_kwargs model_class_overrides model_loader_extra_config numa_bind_cpus numa_bind_nodes
offload_params optimization_level pooler_config profiler_config pt_load_map_location quantization_config
sleep_preserve_parameter_names speculative_config structured_outputs_config watchdog_config
"""
_DECIDED = {
    "Sluice names and finds models itself": "model model_weights served_model_name",
    "Sluice chooses it for the model's task": "runner convert",
    "Sluice queues, and orders the queue": "scheduling_policy max_num_queued_reqs max_num_queued_tokens",
    "Sluice counts by vLLM's statistics and writes its own log": "disable_log_stats enable_log_requests log_level "
    "log_config_file custom_histogram_buckets collect_detailed_traces otlp_traces_endpoint",
    "use --replicas, or --engines for those of other machines": "data_parallel_size data_parallel_rank "
    "data_parallel_start_rank data_parallel_size_local data_parallel_address data_parallel_rpc_port "
    "data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb data_parallel_multi_port_external_lb "
    "enable_elastic_ep elastic_ep_max_dp_size",
    "the model's own defaults are read by Sluice": "generation_config override_generation_config",
    "answers are read by Sluice (--reasoning-parser)": "reasoning_parser reasoning_parser_plugin reasoning_config",
    "log probabilities are the model's, as everywhere in Sluice": "logprobs_mode",
    "tokens leave vLLM as they come": "stream_interval",
}
LEFT_OUT = {name: reason for reason, names in _DECIDED.items() for name in names.split()}
"""Arguments that Sluice decides, and why."""

SETTINGS = SettingsTable(
    "vLLM",
    docs="docs/vllm.md",
    groups={
        "booleans": _group(boolean, _BOOLEANS),
        "whole numbers": _group(none_or(whole(None), "none"), _INTEGERS),
        "numbers": _group(number(), _NUMBERS),
        "words": _group(text, _WORDS),
        "JSON": _group(_json_value, _OBJECTS),
        "Sluice's own": (
            RuntimeSetting(STALL_SETTING, "", number(0.001), "Seconds without a token or step that mean it hangs."),
        ),
        "left out": tuple(RuntimeSetting(name, name, _left_out(reason), reason) for name, reason in LEFT_OUT.items()),
    },
)
