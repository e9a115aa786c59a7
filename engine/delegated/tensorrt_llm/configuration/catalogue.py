"""The settings of TensorRT-LLM that flags and config.pbtxt can make: one table of names, arguments, types and versions.
`docs/tensorrt-llm.md` shows it (a test compares), and EngineConfig's own fields are in `arguments.py`."""

import json
from typing import Any

from engine.runtime_settings import (
    Parse,
    RuntimeSetting,
    SettingsTable,
    boolean,
    count,
    json_object,
    list_of,
    none_or,
    number,
    one_of,
    opposite,
    positive,
    share,
    size_bytes,
    text,
)

PYTORCH = "PyTorch"
"""The backend that runs checkpoints: `tensorrt_llm.LLM`."""
ENGINES = "engines"
"""The backend that runs compiled engines: `_tensorrt_engine.LLM`, before 1.3."""

DECODING_TYPE = "speculative_config.decoding_type"
DECODING_TYPES = {
    "DraftTarget": "DraftTargetDecodingConfig",
    "Eagle": "EagleDecodingConfig",
    "Eagle3": "Eagle3DecodingConfig",
    "Lookahead": "LookaheadDecodingConfig",
    "Medusa": "MedusaDecodingConfig",
    "MTP": "MTPDecodingConfig",
    "NGram": "NGramDecodingConfig",
    "PARD": "PARDDecodingConfig",
    "SA": "SADecodingConfig",
    "AUTO": "AutoDecodingConfig",
}
"""Classes of speculation by the name that files and settings have them under."""
NO_DRAFTS = "none"
"""The value of `decoding_mode` for sampling without drafts: nothing is configured."""


def _row(name: str, target: str, parse: Parse, help: str, where: str = "", also: str = "") -> RuntimeSetting:
    """Make a row of the table. `target` is an argument of the LLM class; "" means the one called `name`, one that ends
    with a dot the field called `name` in there, and _OWN none. `where` names versions and backend as the documentation
    shows them: "from 1.3, PyTorch". `also` has the other names, with spaces between."""
    words = dict(word.split(" ") for word in where.split(", ") if " " in word)
    backend = next((each for each in (PYTORCH, ENGINES) if each in where), "")
    full = f"{target}{name}" if target == "" or target.endswith(".") else target.removeprefix(_OWN)
    since, until = words.get("from", ""), words.get("before", "")
    return RuntimeSetting(name, full, parse, help, tuple(also.split()), since, until, backend)


def _ignored(reason: str, names: str) -> tuple[RuntimeSetting, ...]:
    return tuple(RuntimeSetting(name, "", text, "", no_effect=reason) for name in names.split())


def _on_or_off(value: str) -> dict[str, Any] | None:
    """Read a boolean as a sub-configuration: empty, with its defaults, or None, which switches it off."""
    return {} if boolean(value) else None


def _off_or_on(value: str) -> dict[str, Any] | None:
    return None if boolean(value) else {}


def _draft_tree(value: str) -> list[list[int]]:
    """Read paths of a draft tree: `{0, 0, 0}, {0, 1}` as tensorrtllm_backend writes them, or a JSON list of lists."""
    try:
        read = json.loads(f"[{value.replace('{', '[').replace('}', ']')}]")
    except ValueError:
        read = []
    paths = read[0] if len(read) == 1 and read[0] and isinstance(read[0], list) and _is_paths(read[0]) else read
    if not paths or not _is_paths(paths):
        raise ValueError("paths as {0, 0}, {0, 1}")
    return list(paths)


def _is_paths(value: list[Any]) -> bool:
    return all(isinstance(path, list) and path and all(type(each) is int for each in path) for path in value)


# fmt: off
_KV, _SCHEDULER, _ADP, _DYNAMIC = (
    "kv_cache_config.", "scheduler_config.", "attention_dp_config.", "scheduler_config.dynamic_batch_config.")
_GRAPHS, _COMPILE, _MOE = "cuda_graph_config.", "torch_compile_config.", "moe_config."
_LORA, _PEFT, _SPEC = "lora_config.", "peft_cache_config.", "speculative_config."
_KNOBS, _QUANT, _XFER = "extended_runtime_perf_knob_config.", "quant_config.", "cache_transceiver_config."
_OWN = "-"

SETTINGS = SettingsTable("TensorRT-LLM", docs="docs/tensorrt-llm.md", groups={
"KV cache": (
    _row("free_gpu_memory_fraction", _KV, share,
         "Share of the GPU memory that is free once the model is loaded; with other limits the smallest wins.",
         also="kv_cache_free_gpu_memory_fraction kv_cache_free_gpu_mem_fraction kv_cache_memory_fraction"),
    _row("kv_cache_max_tokens", _KV + "max_tokens", positive,
         "Most tokens that the cache holds.", also="max_tokens_in_paged_kv_cache"),
    _row("max_gpu_total_bytes", _KV, size_bytes, "Most GPU memory of the cache.", also="kv_cache_memory_bytes"),
    _row("tokens_per_block", _KV, positive, "Tokens in a block.", also="block_size"),
    _row("kv_cache_dtype", _KV + "dtype", one_of("auto", "fp8", "nvfp4"),
         "Type of cached keys and values; auto is what the checkpoint says.", PYTORCH),
    _row("mamba_ssm_cache_dtype", _KV, one_of("auto", "float16", "bfloat16", "float32"),
         "Type of the state of Mamba layers.", PYTORCH),
    _row("enable_block_reuse", _KV, boolean,
         "Keep blocks of finished requests for others that begin alike.",
         also="enable_kv_cache_reuse enable_prefix_caching"),
    _row("enable_partial_reuse", _KV, boolean, "Reuse a block of which only a part fits."),
    _row("copy_on_partial_reuse", _KV, boolean, "Copy a partly reused block where another request uses it."),
    _row("host_cache_size", _KV, size_bytes,
         "Host memory that blocks are offloaded to.", also="kv_cache_host_memory_bytes"),
    _row("onboard_blocks", _KV, boolean,
         "Copy offloaded blocks back before they are used.", also="kv_cache_onboard_blocks"),
    _row("secondary_offload_min_priority", _KV, count, "Only blocks of a higher priority (0 to 100) are offloaded."),
    _row("max_attention_window", _KV, list_of(positive),
         "Attention windows in tokens, repeated over the layers.", also="max_attention_window_size"),
    _row("sink_token_length", _KV, count, "First tokens that stay in every attention window."),
    _row("cross_kv_cache_fraction", _KV, share, "Share of the cache for cross attention (encoder-decoder models)."),
    _row("event_buffer_max_size", _KV, count, "KV-cache events that are kept until they are read; 0 is none."),
    _row("attention_dp_events_gather_period_ms", _KV, positive,
         "How often events are gathered from the ranks of attention data parallelism."),
    _row("use_uvm", _KV, boolean, "Cache in unified virtual memory."),
    _row("use_kv_cache_manager_v2", _KV, boolean, "The experimental second cache manager.", "from 1.3"),
    _row("max_util_for_resume", _KV, number(0.0, 1.0),
         "Cache use up to which the second manager resumes paused requests.", "from 1.3"),
),
"Scheduling": (
    _row("max_batch_size", "", positive, "Most requests in one iteration.", also="max_num_seqs max_num_sequences"),
    _row("max_num_tokens", "", positive, "Most tokens in one iteration.", also="max_num_batched_tokens"),
    _row("max_seq_len", "", positive, "Longest prompt and output together.", also="max_model_len"),
    _row("max_input_len", "", positive, "Longest prompt."),
    _row("max_beam_width", "", positive, "Most beams of a request; the searches must be as wide."),
    _row("capacity_scheduler_policy", _SCHEDULER, one_of("GUARANTEED_NO_EVICT", "MAX_UTILIZATION", "STATIC_BATCH"),
         "Which requests may hold KV blocks.", also="batch_scheduler_policy scheduler_policy"),
    _row("context_chunking_policy", _SCHEDULER, one_of("FIRST_COME_FIRST_SERVED", "EQUAL_PROGRESS"),
         "Which prompts get the tokens of an iteration where several are chunked."),
    _row("waiting_queue_policy", _SCHEDULER, one_of("fcfs"),
         "Order of TensorRT-LLM's own queue, which is short: requests wait in front of it.", "from 1.3"),
    _row("enable_batch_size_tuning", _DYNAMIC, boolean,
         "Lower max_batch_size while requests are such that it pays.", ENGINES),
    _row("enable_max_num_tokens_tuning", _DYNAMIC, boolean,
         "Lower max_num_tokens while requests are such that it pays.", ENGINES),
    _row("dynamic_batch_moving_average_window", _DYNAMIC, positive,
         "Requests that both tunings take into account.", ENGINES),
    _row("enable_chunked_prefill", "", boolean,
         "Prefill long prompts in chunks. Default: where max_num_tokens is less than the longest prompt.",
         also="enable_chunked_context"),
    _row("batching_type", "",
         one_of("INFLIGHT", "STATIC", inflight_fused_batching="INFLIGHT", inflight_batching="INFLIGHT", v1="STATIC"),
         "Whether requests join a batch that runs.", ENGINES, also="batching_strategy gpt_model_type"),
    _row("disable_overlap_scheduler", "", boolean, "Plan an iteration only when the last one has ended.", PYTORCH),
    _row("enable_overlap_scheduler", "disable_overlap_scheduler", opposite,
         "The opposite of disable_overlap_scheduler.", PYTORCH),
    _row("batch_wait_timeout_ms", "", number(0.0), "How long to wait for a full batch.", PYTORCH),
    _row("batch_wait_timeout_iters", "", count, "How long to wait for a full batch, in iterations.", PYTORCH),
    _row("batch_wait_max_tokens_ratio", "", share,
         "Share of max_num_tokens that ends the wait for a full batch.", PYTORCH),
    _row("stream_interval", "", positive,
         "Iterations between the responses of a stream. Raising it spares work where batches are large.", PYTORCH),
    _row("attention_dp_enable_balance", _ADP + "enable_balance", boolean,
         "Wait until the ranks of attention data parallelism have equal work.", PYTORCH),
    _row("attention_dp_timeout_iters", _ADP + "timeout_iters", count,
         "Longest wait for equal work, in iterations.", PYTORCH),
    _row("attention_dp_batching_wait_iters", _ADP + "batching_wait_iters", count,
         "Iterations to wait for requests to batch.", PYTORCH),
),
"Loading and computing": (
    _row("dtype", "", one_of("auto", "bfloat16", "float16", "float32", bf16="bfloat16", f16="float16", f32="float32"),
         "Type of computation; auto is what the checkpoint says."),
    _row("load_format", "", one_of("auto", "dummy", "vision_only"), "dummy: weights at random."),
    _row("checkpoint_format", "", text, "Format of the checkpoint's files.", PYTORCH),
    _row("trust_remote_code", "", boolean, "Run code that comes with the checkpoint."),
    _row("model_kwargs", "", json_object, "Values over those of config.json.", "from 1.3"),
    _row("tokenizer_dir", "tokenizer", text, "Folder of the tokenizer, for guided decoding.", also="tokenizer"),
    _row("tokenizer_mode", "", one_of("auto", "slow"), "Which implementation of the tokenizer."),
    _row("custom_tokenizer", "", text, "Class of the tokenizer, or a name for it.", "from 1.3"),
    _row("backend", "", one_of("pytorch", "tensorrt"),
         "tensorrt (before 1.3) compiles an engine of a HuggingFace checkpoint at load."),
    _row("guided_decoding_backend", "", none_or(one_of("xgrammar", "llguidance"), "none"),
         "What makes outputs match a grammar, or none. Default: xgrammar where there are a tokenizer.json, no "
         "speculation and no compiled engine."),
    _row("attn_backend", "", text, "Kernels of attention: TRTLLM, FLASHINFER, VANILLA.", PYTORCH),
    _row("sampler_type", "", one_of("auto", "TorchSampler", "TRTLLMSampler"),
         "The sampler. Before 1.3 only TRTLLMSampler has penalties.", PYTORCH),
    _row("sampler_force_async_worker", "", boolean, "Copy sampled tokens in a separate thread.", "from 1.3, PyTorch"),
    _row("disable_flashinfer_sampling", "", boolean, "Sample without FlashInfer's kernels.", "from 1.3, PyTorch"),
    _row("cuda_graphs", "cuda_graph_config", _on_or_off,
         "false: decode without CUDA graphs.", PYTORCH, also="use_cuda_graph"),
    _row("enforce_eager", "cuda_graph_config", _off_or_on,
         "true: decode without CUDA graphs, as cuda_graphs=false.", PYTORCH),
    _row("cuda_graph_batch_sizes", _GRAPHS + "batch_sizes", list_of(positive),
         "Batch sizes that graphs are made for.", PYTORCH),
    _row("cuda_graph_max_batch_size", _GRAPHS + "max_batch_size", count,
         "Largest batch size that graphs are made for, where sizes are not listed.", PYTORCH),
    _row("cuda_graph_enable_padding", _GRAPHS + "enable_padding", boolean,
         "Run a batch in the next larger graph.", PYTORCH),
    _row("torch_compile", "torch_compile_config", _on_or_off, "true: compile the model with torch.compile.", PYTORCH),
    _row("torch_compile_enable_fullgraph", _COMPILE + "enable_fullgraph", boolean,
         "Compile the model as one graph.", PYTORCH),
    _row("torch_compile_enable_inductor", _COMPILE + "enable_inductor", boolean, "Compile with Inductor.", PYTORCH),
    _row("torch_compile_enable_piecewise_cuda_graph", _COMPILE + "enable_piecewise_cuda_graph", boolean,
         "Capture parts of the compiled model in CUDA graphs.", PYTORCH),
    _row("torch_compile_capture_num_tokens", _COMPILE + "capture_num_tokens", list_of(positive),
         "Token counts that such graphs are captured for.", PYTORCH),
    _row("torch_compile_enable_userbuffers", _COMPILE + "enable_userbuffers", boolean,
         "Use buffers that GPUs share.", PYTORCH),
    _row("torch_compile_max_num_streams", _COMPILE + "max_num_streams", positive, "Most CUDA streams.", PYTORCH),
    _row("enable_autotuner", "", boolean, "Choose the fastest kernels at load.", PYTORCH),
    _row("enable_min_latency", "", boolean, "Kernels for small batches.", PYTORCH),
    _row("moe_backend", _MOE + "backend",
         one_of("CUTLASS", "CUTEDSL", "WIDEEP", "TRTLLM", "DEEPGEMM", "VANILLA", "TRITON"),
         "Kernels of the experts.", PYTORCH),
    _row("moe_max_num_tokens", _MOE + "max_num_tokens", positive,
         "Most tokens in one call of the experts' kernels.", PYTORCH),
    _row("moe_load_balancer", _MOE + "load_balancer", text, "File that spreads the experts.", PYTORCH),
    _row("moe_disable_finalize_fusion", _MOE + "disable_finalize_fusion", boolean,
         "Sum the experts' outputs in a fixed order.", PYTORCH),
    _row("moe_use_low_precision_combine", _MOE + "use_low_precision_moe_combine", boolean,
         "Sum the experts' outputs in low precision.", PYTORCH),
    _row("force_dynamic_quantization", "", boolean,
         "Scale activations as they come, not by the checkpoint's scales.", PYTORCH),
    _row("use_cute_dsl_blockscaling_mm", "", boolean, "CuTe kernels for FP8 with block scales.", "from 1.3, PyTorch"),
    _row("use_cute_dsl_blockscaling_bmm", "", boolean,
         "CuTe kernels for FP8 products of matrix batches.", "from 1.3, PyTorch"),
    _row("garbage_collection_gen0_threshold", "", positive, "Objects between two collections by Python.", PYTORCH),
),
"Parallelism": (
    _row("tensor_parallel_size", "", positive, "GPUs that share each layer.", also="tp_size"),
    _row("pipeline_parallel_size", "", positive, "Groups of GPUs that the layers are spread over.", also="pp_size"),
    _row("context_parallel_size", "", positive, "GPUs that share a long context.", also="cp_size"),
    _row("cp_config", "", json_object, "How GPUs share a long context."),
    _row("moe_expert_parallel_size", "", positive,
         "GPUs that the experts are spread over.", also="ep_size expert_parallel_size"),
    _row("moe_tensor_parallel_size", "", positive, "GPUs that share each expert."),
    _row("moe_cluster_parallel_size", "", positive,
         "Groups of GPUs that clusters of experts are spread over.", also="cluster_size"),
    _row("enable_attention_dp", "", boolean, "Each GPU has the attention of its own requests."),
    _row("enable_lm_head_tp_in_adp", "", boolean, "GPUs share the last layer where each has its own attention."),
    _row("pp_partition", "", list_of(positive), "Layers of each group of a pipeline.", "from 1.3"),
    _row("gpus_per_node", "", positive, "GPUs of a machine. Default: those that are visible."),
    _row("orchestrator_type", "", none_or(one_of("rpc", "ray"), "mpi"),
         "What starts the ranks: mpi (default), rpc or ray."),
    _row("ray_worker_extension_cls", "", text, "Class that Ray's workers are extended by.", PYTORCH),
    _row("allreduce_strategy", "",
         one_of("AUTO", "NCCL", "UB", "MINLATENCY", "ONESHOT", "TWOSHOT", "LOWPRECISION", "MNNVL", "NCCL_SYMMETRIC"),
         "How sums over GPUs are made.", PYTORCH),
    _row("env_overrides", "", json_object, "Environment variables of the workers.", "from 1.3"),
),
"LoRA": (
    _row("lora_dir", _OWN, list_of(text),
         "Folders of adapters, or folders of such folders. An adapter has its folder's name."),
    _row("max_lora_rank", _LORA, positive, "Largest rank of an adapter. Default: that of the given ones."),
    _row("max_loras", _LORA, positive, "Adapters on the GPU at once."),
    _row("max_cpu_loras", _LORA, positive, "Adapters in host memory at once."),
    _row("lora_target_modules", _LORA, list_of(text),
         "Modules that adapters change, by TensorRT-LLM's names. Default: those of the given ones."),
    _row("lora_ckpt_source", _LORA, one_of("hf", "nemo"), "Who wrote the adapters."),
    _row("lora_cache_optimal_adapter_size", _PEFT + "optimal_adapter_size", positive,
         "Rank that the pages of the adapter cache are made for."),
    _row("lora_cache_max_adapter_size", _PEFT + "max_adapter_size", positive, "Largest rank in the cache."),
    _row("lora_cache_gpu_memory_fraction", _PEFT + "device_cache_percent", share,
         "Share of the free GPU memory for the cache."),
    _row("lora_cache_host_memory_bytes", _PEFT + "host_cache_size", size_bytes, "Host memory of the cache."),
    _row("lora_cache_num_host_module_layers", _PEFT + "num_host_module_layer", count,
         "Host size of the cache in layers of modules; goes over the bytes."),
    _row("lora_cache_num_device_module_layers", _PEFT + "num_device_module_layer", count,
         "GPU size of the cache in layers of modules; goes over the share."),
    _row("lora_cache_num_put_workers", _PEFT + "num_put_workers", positive,
         "Threads that fill the host's part of the cache."),
    _row("lora_cache_num_ensure_workers", _PEFT + "num_ensure_workers", positive,
         "Threads that fill the GPU's part of the cache."),
    _row("lora_cache_num_copy_streams", _PEFT + "num_copy_streams", positive, "CUDA streams that copy."),
    _row("lora_cache_max_pages_per_block_host", _PEFT + "max_pages_per_block_host", positive, "Pages of a host block."),
    _row("lora_cache_max_pages_per_block_device", _PEFT + "max_pages_per_block_device", positive,
         "Pages of a GPU block."),
),
"Speculation": (
    _row("speculative_decoding_type", DECODING_TYPE,
         one_of(*DECODING_TYPES, draft_target="DraftTarget", user_draft_model="DraftTarget"),
         "Where draft tokens come from."),
    _row("decoding_mode", DECODING_TYPE,
         one_of(top_k=NO_DRAFTS, top_p=NO_DRAFTS, top_k_top_p=NO_DRAFTS, beam_search=NO_DRAFTS, auto=NO_DRAFTS,
                medusa="Medusa", lookahead="Lookahead", eagle="Eagle"),
         "tensorrtllm_backend's word for it; each request says how it samples."),
    _row("speculative_max_draft_len", _SPEC + "max_draft_len", positive,
         "Most draft tokens of a request in an iteration.", also="num_speculative_tokens"),
    _row("speculative_model", _SPEC, text,
         "Folder of the draft model, or of Eagle's or PARD's weights.", also="speculative_model_dir draft_model_path"),
    _row("speculative_max_concurrency", _SPEC + "max_concurrency", positive,
         "Batch size above which there are no drafts.", PYTORCH),
    _row("speculative_load_format", _SPEC + "load_format", text, "How the draft model is loaded."),
    _row("max_matching_ngram_size", _SPEC, positive,
         "NGram: longest n-gram that is searched for.", PYTORCH, also="prompt_lookup_max"),
    _row("ngram_is_keep_all", _SPEC + "is_keep_all", boolean, "NGram: keep all continuations of an n-gram.", PYTORCH),
    _row("ngram_is_use_oldest", _SPEC + "is_use_oldest", boolean,
         "NGram: take the oldest continuation, else the newest.", PYTORCH),
    _row("ngram_is_public_pool", _SPEC + "is_public_pool", boolean, "NGram: one pool for all requests.", PYTORCH),
    _row("num_nextn_predict_layers", _SPEC, positive, "MTP: layers, each of which drafts a token.", PYTORCH),
    _row("use_relaxed_acceptance_for_thinking", _SPEC, boolean,
         "MTP: accept more tokens while a model thinks.", PYTORCH),
    _row("relaxed_topk", _SPEC, positive, "MTP: candidates that relaxed acceptance considers.", PYTORCH),
    _row("relaxed_delta", _SPEC, number(0.0),
         "MTP: how far below the likeliest candidate an accepted token may be.", PYTORCH),
    _row("eagle_choices", _SPEC, _draft_tree, "Eagle: paths of its draft tree."),
    _row("eagle_greedy_sampling", _SPEC + "greedy_sampling", boolean,
         "Eagle: accept only the tokens that greedy decoding would choose."),
    _row("eagle_posterior_threshold", _SPEC + "posterior_threshold", number(0.0, 1.0),
         "Eagle: threshold of typical acceptance."),
    _row("eagle_use_dynamic_tree", _SPEC + "use_dynamic_tree", boolean, "Eagle: build the draft tree dynamically."),
    _row("eagle_dynamic_tree_max_topk", _SPEC + "dynamic_tree_max_topK", positive,
         "Eagle: branches of a dynamic tree."),
    _row("eagle3_one_model", _SPEC, boolean, "Eagle3: drafts are made within the model.", PYTORCH),
    _row("eagle3_layers_to_capture", _SPEC, list_of(count), "Eagle3: layers that drafts are made of.", PYTORCH),
    _row("medusa_choices", _SPEC, _draft_tree, "Medusa: paths of its draft tree.", ENGINES),
    _row("num_medusa_heads", _SPEC, positive, "Medusa: its heads.", ENGINES),
    _row("lookahead_window_size", _SPEC + "max_window_size", positive,
         "Lookahead: n-grams that are guessed at once.", ENGINES),
    _row("lookahead_ngram_size", _SPEC + "max_ngram_size", positive, "Lookahead: tokens of an n-gram.", ENGINES),
    _row("lookahead_verification_set_size", _SPEC + "max_verification_set_size", positive,
         "Lookahead: n-grams that are verified at once.", ENGINES),
),
"Statistics": (
    _row("enable_iter_perf_stats", "", boolean,
         "Statistics of each iteration. Default: true; metrics and the predicted wait are made of them.", PYTORCH),
    _row("enable_iter_req_stats", "", boolean, "Statistics of each request in each iteration.", PYTORCH),
    _row("iter_stats_max_iterations", "", count, "Iterations whose statistics are kept."),
    _row("request_stats_max_iterations", "", count, "Iterations whose statistics of requests are kept."),
    _row("max_stats_len", "", positive, "Statistics kept until read.", "from 1.3, PyTorch"),
    _row("return_perf_metrics", "", boolean,
         "Times and cache use of each request. Default: true; cached tokens are read from them."),
    _row("perf_metrics_max_requests", "", count, "Requests whose metrics are kept."),
    _row("print_iter_log", "", boolean, "Log each iteration.", PYTORCH),
    _row("enable_layerwise_nvtx_marker", "", boolean, "Mark layers for NVIDIA's profiler.", PYTORCH),
    _row("otlp_traces_endpoint", "", text, "Where traces are sent.", "from 1.3"),
    _row("stall_timeout_s", _OWN, number(0.0),
         "Seconds without any output, while requests run, after which the engine counts as hung and is started again."),
),
"Compiled engines": (
    _row("multi_block_mode", _KNOBS, boolean, "Several blocks of threads for one sequence's attention.", ENGINES),
    _row("enable_context_fmha_fp32_acc", _KNOBS, boolean, "Attention of the prompt sums in 32 bits.", ENGINES),
    _row("cuda_graph_mode", _KNOBS, boolean, "Decode in CUDA graphs.", ENGINES),
    _row("cuda_graph_cache_size", _KNOBS, count, "Graphs that are kept.", ENGINES),
    _row("normalize_log_probs", "", boolean, "Log probabilities of beams by their lengths.", ENGINES),
    _row("fail_fast_on_attention_window_too_large", "", boolean,
         "Fail at load where the cache cannot hold one attention window.", "before 1.3"),
    _row("embedding_parallel_mode", "", one_of("NONE", "SHARDING_ALONG_VOCAB", "SHARDING_ALONG_HIDDEN"),
         "How GPUs share the embedding when an engine is compiled at load.", ENGINES),
    _row("fast_build", "", boolean, "Compile faster, run slower.", ENGINES),
    _row("enable_build_cache", "", boolean, "Keep compiled engines.", ENGINES),
    _row("workspace", "", text, "Folder of files made while compiling.", ENGINES),
    _row("quant_algo", _QUANT, str.upper,
         "Quantisation of an engine that is compiled at load, as FP8 or W4A16_AWQ.", ENGINES),
    _row("kv_cache_quant_algo", _QUANT, str.upper,
         "Quantisation of such an engine's KV cache, as FP8 or INT8.", ENGINES),
    _row("quant_group_size", _QUANT + "group_size", positive, "Weights that share one scale.", ENGINES),
),
"Transfer of KV blocks": (
    _row("cache_transceiver_backend", _XFER + "backend", one_of("DEFAULT", "UCX", "NIXL", "MOONCAKE", "MPI"),
         "What moves KV blocks between servers."),
    _row("cache_transceiver_runtime", _XFER + "transceiver_runtime", one_of("CPP", "PYTHON"),
         "Implementation of the transfer.", "from 1.3"),
    _row("cache_transceiver_max_tokens_in_buffer", _XFER + "max_tokens_in_buffer", positive,
         "Tokens that its buffer holds."),
    _row("kv_transfer_timeout_ms", _XFER, positive, "Longest transfer."),
    _row("kv_transfer_sender_future_timeout_ms", _XFER, positive, "Longest wait of the sender while nothing runs."),
),
"Without effect": (
    *_ignored("the model's folder is its version folder, or what model_path says",
              "engine_dir gpt_model_path encoder_engine_dir encoder_model_path"),
    *_ignored("the LLM API is told of each request and cancel at once",
              "cancellation_check_period_ms stats_check_period_ms recv_poll_period_ms"),
    *_ignored("ranks are started by the launcher (MPI) or orchestrator_type; GPUs are chosen by CUDA_VISIBLE_DEVICES",
              "gpu_device_ids participant_ids num_nodes executor_worker_path"),
    *_ignored("each request says whether its prompt is part of the answer", "exclude_input_in_output"),
    *_ignored("the LLM API keeps all weights on the GPU", "gpu_weights_percent"),
    *_ignored("TensorRT-LLM ignores it since 0.10", "enable_trt_overlap"),
    *_ignored("TensorRT-LLM cannot prefetch adapters; they are loaded when first asked for", "lora_prefetch_dir"),
    *_ignored("drafts are made within the engine", "speculative_decoding_fast_logits"),
    *_ignored("the grammar's vocabulary is made of the tokenizer", "xgrammar_tokenizer_info_path"),
    *_ignored("tensors of requests are read by this server", "FORCE_CPU_ONLY_INPUT_TENSORS"),
),
})
# fmt: on
