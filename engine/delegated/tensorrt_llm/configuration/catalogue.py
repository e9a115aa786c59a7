"""The settings of TensorRT-LLM that flags and config.pbtxt can make.

A setting is an argument of the LLM class under NVIDIA's own name, dotted where it is a field of a configuration:
`kv_cache_config.event_buffer_max_size`. `fields.json` lists the names by version, for machines where the library is not
installed; at load they are compared with its classes (`classes.py`). The rows below are those that have other names
too, from NVIDIA's Triton backend, trtllm-serve or vLLM, or that are read otherwise than as JSON.
"""

from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import msgspec

from sluice.engine.runtime_settings import (
    Parse,
    RuntimeSetting,
    SettingsTable,
    boolean,
    json_or_text,
    list_of,
    none_or,
    number,
    positive,
    renamed,
    share,
    size_bytes,
    text,
)

ENGINES = "engines"
"""The backend that runs compiled engines: `_tensorrt_engine.LLM`, before 1.3. `fields.json` marks what it alone has."""
VERSIONS = ("1.2", "1.3", "1.4")
"""The releases that `fields.json` tells of."""

DECODING_TYPE = "speculative_config.decoding_type"
NO_DRAFTS = "none"
"""The value of `decoding_mode` for sampling without drafts: nothing is configured."""


def _read_fields() -> dict[str, tuple[str, ...]]:
    """Return the places that have each argument, by its dotted name: versions, or ENGINES alone."""
    path = Path(__file__).with_name("fields.json")
    told = msgspec.json.decode(path.read_bytes(), type=dict[str, dict[str, list[str]]])
    return {
        f"{config}.{name}" if config else name: tuple(places.split())
        for config, lists in told.items()
        for places, lines in lists.items()
        for name in " ".join(lines).split()
    }


FIELDS = MappingProxyType(_read_fields())
"""Versions by argument."""
CONFIGS = frozenset(name.rpartition(".")[0] for name in FIELDS) - {""}
"""The arguments, and fields of such, that are configurations with fields of their own."""


def _row(target: str, parse: Parse, also: str = "", help: str = "", name: str = "") -> RuntimeSetting:
    backend = ENGINES if FIELDS.get(target) == (ENGINES,) else ""
    return RuntimeSetting(name or target, target, parse, help, tuple(also.split()), backend=backend)


def _ignored(reason: str, names: str) -> tuple[RuntimeSetting, ...]:
    return tuple(RuntimeSetting(name, "", text, "", no_effect=reason) for name in names.split())


def _draft_tree(value: str) -> list[list[int]]:
    """Read paths of a draft tree: `{0, 0, 0}, {0, 1}` as tensorrtllm_backend writes them, or a JSON list of lists."""
    text = "".join(value.replace("{", "[").replace("}", "]").split())
    try:
        return msgspec.json.decode(text if text.startswith("[[") else f"[{text}]", type=_Paths)
    except msgspec.DecodeError:
        raise ValueError("paths as {0, 0}, {0, 1}") from None


_Path = Annotated[list[int], msgspec.Meta(min_length=1)]
_Paths = Annotated[list[_Path], msgspec.Meta(min_length=1)]
_SAMPLING_MODES = dict.fromkeys(("top_k", "top_p", "top_k_top_p", "beam_search", "auto"), NO_DRAFTS)

# fmt: off
_ROWS = (
    _row("max_batch_size", positive, "max_num_seqs max_num_sequences", "Most requests in one iteration."),
    _row("max_num_tokens", positive, "max_num_batched_tokens", "Most tokens in one iteration."),
    _row("max_seq_len", positive, "max_model_len", "Longest prompt and output together."),
    _row("max_beam_width", positive, "", "Most beams of a request."),
    _row("kv_cache_config.free_gpu_memory_fraction", share,
         "free_gpu_memory_fraction kv_cache_free_gpu_memory_fraction kv_cache_free_gpu_mem_fraction "
         "kv_cache_memory_fraction", "Share of the free GPU memory that the KV cache gets."),
    _row("kv_cache_config.max_tokens", positive, "kv_cache_max_tokens max_tokens_in_paged_kv_cache",
         "Most tokens that the KV cache holds."),
    _row("kv_cache_config.max_gpu_total_bytes", size_bytes, "max_gpu_total_bytes kv_cache_memory_bytes",
         "Most GPU memory of the KV cache."),
    _row("kv_cache_config.host_cache_size", size_bytes, "host_cache_size kv_cache_host_memory_bytes",
         "Host memory that KV blocks are offloaded to."),
    _row("kv_cache_config.dtype", str.lower, "kv_cache_dtype", "Type of cached keys and values."),
    _row("kv_cache_config.tokens_per_block", positive, "tokens_per_block block_size", "Tokens in a block."),
    _row("kv_cache_config.enable_block_reuse", boolean,
         "enable_block_reuse enable_kv_cache_reuse enable_prefix_caching",
         "Keep blocks of finished requests for others that begin alike."),
    _row("scheduler_config.capacity_scheduler_policy", str.upper,
         "capacity_scheduler_policy batch_scheduler_policy scheduler_policy", "Which requests may hold KV blocks."),
    _row("enable_chunked_prefill", boolean, "enable_chunked_context", "Prefill long prompts in chunks."),
    _row("tensor_parallel_size", positive, "tp_size", "GPUs that share each layer."),
    _row("pipeline_parallel_size", positive, "pp_size", "Groups of GPUs that the layers are spread over."),
    _row("moe_expert_parallel_size", positive, "ep_size expert_parallel_size", "GPUs that experts are spread over."),
    _row("guided_decoding_backend", none_or(str.lower, "none"), "",
         "What makes outputs match a grammar: xgrammar, llguidance or none."),
    _row(DECODING_TYPE, text, "speculative_decoding_type", "Where draft tokens come from: Eagle3, MTP, NGram, ..."),
    _row("speculative_config.max_draft_len", positive, "speculative_max_draft_len num_speculative_tokens",
         "Most draft tokens of a request in an iteration."),
    _row("speculative_config.speculative_model", text,
         "speculative_model speculative_model_dir draft_model_path speculative_config.speculative_model_dir",
         "Folder of the draft model, or of Eagle's or PARD's weights."),
    _row("lora_config.max_lora_rank", positive, "max_lora_rank", "Largest rank of an adapter."),
    RuntimeSetting("lora_dir", "", list_of(text),
                   "Folders of adapters, or folders of such. An adapter has its folder's name."),
    _row("trust_remote_code", boolean, "", "Run code that comes with the checkpoint."),
    _row("cuda_graph_config", lambda value: {} if boolean(value) else None, "use_cuda_graph",
         "false: decode without CUDA graphs.", name="cuda_graphs"),
    RuntimeSetting(
        "stall_timeout_s", "", number(0.0),
        "Seconds without any output, while requests run, after which the engine counts as hung and is started again."
    ),
)
"""The settings that operators of every server know. docs/tensorrt-llm.md shows them."""

_FROM_OTHER_SERVERS = (
    _row("cuda_graph_config", lambda value: None if boolean(value) else {}, name="enforce_eager"),
    _row("dtype", renamed(bf16="bfloat16", f16="float16", f32="float32")),
    _row("tokenizer", text, "tokenizer_dir"),
    _row("backend", str.lower),
    _row("context_parallel_size", positive, "cp_size"),
    _row("moe_cluster_parallel_size", positive, "cluster_size"),
    _row("orchestrator_type", none_or(str.lower, "mpi")),
    _row("batching_type", renamed(inflight_fused_batching="INFLIGHT", inflight_batching="INFLIGHT",
                                  inflight="INFLIGHT", v1="STATIC", static="STATIC"),
         "batching_strategy gpt_model_type"),
    _row("lora_config.max_loras", positive, "max_loras"),
    _row("lora_config.max_cpu_loras", positive, "max_cpu_loras"),
    # NVIDIA's Triton backend
    _row("kv_cache_config.onboard_blocks", boolean, "kv_cache_onboard_blocks"),
    _row("kv_cache_config.sink_token_length", json_or_text, "sink_token_length"),
    _row("kv_cache_config.cross_kv_cache_fraction", share, "cross_kv_cache_fraction"),
    _row("kv_cache_config.max_attention_window", list_of(positive), "max_attention_window max_attention_window_size"),
    _row("peft_cache_config.optimal_adapter_size", positive, "lora_cache_optimal_adapter_size"),
    _row("peft_cache_config.max_adapter_size", positive, "lora_cache_max_adapter_size"),
    _row("peft_cache_config.device_cache_percent", share, "lora_cache_gpu_memory_fraction"),
    _row("peft_cache_config.host_cache_size", size_bytes, "lora_cache_host_memory_bytes"),
    _row(DECODING_TYPE, renamed(**_SAMPLING_MODES, medusa="Medusa", lookahead="Lookahead", eagle="Eagle"),
         name="decoding_mode"),
    _row("speculative_config.eagle_choices", _draft_tree, "eagle_choices"),
    _row("speculative_config.medusa_choices", _draft_tree, "medusa_choices"),
    _row("speculative_config.max_window_size", positive, "lookahead_window_size"),
    _row("speculative_config.max_ngram_size", positive, "lookahead_ngram_size"),
    _row("speculative_config.max_verification_set_size", positive, "lookahead_verification_set_size"),
    _row("extended_runtime_perf_knob_config.multi_block_mode", boolean, "multi_block_mode"),
    _row("extended_runtime_perf_knob_config.enable_context_fmha_fp32_acc", boolean, "enable_context_fmha_fp32_acc"),
    _row("extended_runtime_perf_knob_config.cuda_graph_mode", boolean, "cuda_graph_mode"),
    _row("extended_runtime_perf_knob_config.cuda_graph_cache_size", json_or_text, "cuda_graph_cache_size"),
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
)
# fmt: on

_NAMED = {row.name for row in (*_ROWS, *_FROM_OTHER_SERVERS)}
SETTINGS = SettingsTable(
    "TensorRT-LLM",
    docs="docs/tensorrt-llm.md",
    groups={
        "operators": _ROWS,
        "other servers": _FROM_OTHER_SERVERS,
        "arguments": tuple(_row(name, json_or_text) for name in FIELDS if name not in _NAMED),
    },
)


def versions_of(target: str) -> str:
    """Return the known versions that have an argument, in words: "1.3 or 1.4"; "" where none is known to."""
    places = FIELDS.get(target, ())
    return f"{VERSIONS[0]} with compiled engines" if places == (ENGINES,) else " or ".join(places)
