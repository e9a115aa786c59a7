"""The effect of each parameter of config.pbtxt on TensorRT-LLM: every row of its table."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.engine.config import EngineConfig, Runtime, SchedulerPolicy, Speculation, Task
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import SETTINGS
from sluice.errors import SluiceError
from sluice.pipelines.llm.parameter_effects import SHARED_RULES
from sluice.pipelines.llm.parameters import apply_parameters
from sluice.pipelines.llm.tensorrt_llm_parameters import TENSORRT_LLM_RULES
from tests.pipelines.llm.parameter_checks import changed, check_fields, check_fields_and_note, check_refused
from tests.stand_ins.model_folders import make_checkpoint, make_compiled_engine

GIVEN = EngineConfig(
    model_path="nowhere",
    runtime=Runtime.TENSORRT_LLM,
    kv_cache_memory_bytes=1 << 30,
    kv_cache_memory_fraction=0.8,
    runtime_settings={"max_beam_width": "2", "moe_config.backend": "TRTLLM"},
)
TEMPLATE_KEYS = """
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
executor_worker_path FORCE_CPU_ONLY_INPUT_TENSORS max_num_sequences enable_trt_overlap max_queue_size
"""
"""Parameters of NVIDIA's Triton backend, by the names in its templates and in the files made of them."""
EAGLE = {
    "speculative_config.decoding_type": "Eagle",
    "speculative_config.speculative_model": "/eagle",
    "speculative_config.max_draft_len": "3",
}

FIELDS: list[tuple[str, str, dict[str, Any]]] = [
    ("gpt_model_type", "inflight_fused_batching", {}),
    ("batching_type", "INFLIGHT", {}),
    ("batching_type", "STATIC", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("batching_strategy", "V1", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("decoding_mode", "beam_search", {}),
    ("decoding_mode", "top_k_top_p", {}),
    ("batch_scheduler_policy", "max_utilization", {"scheduler_policy": SchedulerPolicy.MAX_UTILIZATION}),
    ("scheduler_config.capacity_scheduler_policy", "STATIC_BATCH", {"scheduler_policy": SchedulerPolicy.STATIC_BATCH}),
    ("kv_cache_config.enable_block_reuse", "false", {"enable_prefix_caching": False}),
    ("kv_cache_config.dtype", "fp8", {"kv_cache_dtype": "fp8"}),
    (
        "kv_cache_config.free_gpu_memory_fraction",
        "0.5",
        {"kv_cache_memory_fraction": 0.5, "kv_cache_memory_bytes": None},
    ),
    ("tensor_parallel_size", "2", {"tensor_parallel_size": 2}),
    ("tp_size", "2", {"tensor_parallel_size": 2}),
    ("pipeline_parallel_size", "4", {"pipeline_parallel_size": 4}),
    ("pp_size", "4", {"pipeline_parallel_size": 4}),
    ("task", "score", {"task": Task.SCORE}),
    ("data_parallel_size", "1", {}),
    ("num_nodes", "1", {}),
    ("distributed_executor_backend", "mp", {}),
    ("enable_lora", "true", {"enable_lora": True}),
    ("dtype", "half", {"dtype": "float16"}),
    ("dtype", "bfloat16", {"dtype": "bf16"}),
    ("quantization", "FP8", {"quantization": "fp8"}),
    ("kv_cache_dtype", "fp8_e4m3", {"kv_cache_dtype": "fp8"}),
    ("kv_cache_dtype", "nvfp4", {"kv_cache_dtype": "nvfp4"}),
    ("speculation", "draft_model", {"speculation": Speculation.DRAFT_MODEL}),
    ("draft_model_path", "/draft", {"draft_model_path": "/draft"}),
    ("lora_modules", "sql=/a, chat=/b", {"lora_modules": {"sql": "/a", "chat": "/b"}}),
    ("lora_modules", '{"sql": "/a"}', {"lora_modules": {"sql": "/a"}}),
    ("max_seq_len", "4096", {"max_model_len": 4096}),
    (
        "speculative_config",
        '{"method": "ngram", "num_speculative_tokens": 5}',
        {"speculation": Speculation.NGRAM, "num_speculative_tokens": 5},
    ),
    (
        "speculative_config",
        '{"model": "/draft", "num_speculative_tokens": 3}',
        {"speculation": Speculation.DRAFT_MODEL, "draft_model_path": "/draft", "num_speculative_tokens": 3},
    ),
]

AS_SETTINGS: list[tuple[str, str, dict[str, str]]] = [
    ("kv_cache_host_memory_bytes", "1073741824", {"kv_cache_config.host_cache_size": "1073741824"}),
    ("swap_space", "4", {"kv_cache_config.host_cache_size": str(4 << 30)}),
    ("kv_cache_onboard_blocks", "false", {"kv_cache_config.onboard_blocks": "false"}),
    ("block_size", "64", {"kv_cache_config.tokens_per_block": "64"}),
    ("max_beam_width", "4", {"max_beam_width": "4"}),
    ("decoding_mode", "eagle", {"decoding_mode": "eagle"}),
    ("speculative_decoding_type", "eagle", {"speculative_config.decoding_type": "eagle"}),
    ("speculative_config.decoding_type", "PARD", {"speculative_config.decoding_type": "PARD"}),
    ("eagle_choices", "{0, 0}, {0, 1}", {"speculative_config.eagle_choices": "{0, 0}, {0, 1}"}),
    ("lora_dir", "/loras", {"lora_dir": "/loras"}),
    ("lora_cache_gpu_memory_fraction", "0.1", {"peft_cache_config.device_cache_percent": "0.1"}),
    ("trust_remote_code", "false", {"trust_remote_code": "false"}),
    ("kv_connector_config", "null", {"kv_connector_config": "null"}),
    ("env_overrides", "{}", {"env_overrides": "{}"}),
    ("distributed_executor_backend", "ray", {"orchestrator_type": "ray"}),
    ("speculative_config", '{"method": "eagle3", "model": "/eagle", "num_speculative_tokens": 3}', EAGLE),
    (
        "speculative_config",
        '{"method": "deepseek_mtp", "num_speculative_tokens": 1}',
        {"speculative_config.decoding_type": "MTP", "speculative_config.max_draft_len": "1"},
    ),
]

NOTED: list[tuple[str, str, str]] = [
    ("num_nodes", "2", "engine-launcher"),
    ("engine_launcher", "mpirun -n 8", "the server's own command line alone"),
    ("speculative_config", '{"method": "ngram", "drafter": "evil.Drafter"}', "from the command line alone"),
    ("data_parallel_size", "2", "one engine serves all"),
    ("cpu_offload_gb", "4", "weights stay on the GPU"),
    ("num_threads", "2", "chooses its threads itself"),
    ("quantization", "awq", "as the checkpoint has them"),
    ("executor_worker_path", "/opt/w", "a process of its own"),
    ("gpu_device_ids", "0,1", "CUDA_VISIBLE_DEVICES"),
    ("lora_prefetch_dir", "/l", "cannot prefetch"),
    ("multi_block_mode", "true", "only compiled engines have it"),
    ("normalize_log_probs", "true", "only compiled engines have it"),
    ("unheard_of", "x", "is unknown and has no effect"),
    ("kv_events_config", "{}", "only vLLM has it"),
    (
        "moe_backend",
        "CUTLASS",
        "only vLLM has it, and the model runs on TensorRT-LLM, where it is called moe_config.backend",
    ),
]

REFUSED: list[tuple[str, str, str]] = [
    ("encoder_model_path", "/enc", "models with an encoder are not offered"),
    ("encoder_engine_dir", "/enc", "models with an encoder are not offered"),
    ("gpt_model_type", "V2", "must be inflight_fused_batching, inflight_batching or V1"),
    ("tensor_parallel_size", "0", "must be an integer of at least 1"),
    ("max_beam_width", "none", "must be a whole number of 1 or more, got 'none'"),
    ("dtype", "fp4", "must be one of auto, bf16"),
    ("kv_cache_dtype", "u8", "must be one of auto, fp8, nvfp4"),
    ("speculation", "magic", "must be one of off, ngram, draft_model"),
    ("swap_space", "much", "must be a number of GiB"),
    ("enable_lora", "maybe", "must be true or false"),
    ("lora_modules", "/loras", "must be names of adapters with their folders"),
    ("lora_modules", "{", "must be a JSON object of folders by name"),
    ("max_tokens_in_paged_kv_cache", "0", "must be a whole number of 1 or more"),
    ("kv_cache_config.max_tokens", "0", "must be a whole number of 1 or more"),
    ("event_buffer_max_size", "9", "must be given by its full name, kv_cache_config.event_buffer_max_size, got '9'"),
    ("cuda_graph_batch_sizes", "[1]", "must be given by its full name, cuda_graph_config.batch_sizes"),
    ("torch_compile_enable_inductor", "true", "full name, torch_compile_config.enable_inductor"),
    ("speculative_config", "ngram", "must be a JSON object"),
    ("speculative_config", '{"method": "eagle"}', "must name the model of method eagle"),
    ("speculative_config", '{"method": "suffix"}', "must have one of the methods ngram"),
    ("runtime", "cuda", "must be one of auto, openvino, tensorrt_llm, torch, vllm"),
]


@pytest.mark.parametrize(("key", "text", "fields"), FIELDS)
def test_is_a_field(key: str, text: str, fields: dict[str, Any]) -> None:
    check_fields(GIVEN, key, text, fields)


@pytest.mark.parametrize(("key", "text", "settings"), AS_SETTINGS)
def test_is_a_setting(key: str, text: str, settings: dict[str, str]) -> None:
    config, notes = apply_parameters(GIVEN, "m", {key: text})
    assert config.runtime_settings == GIVEN.runtime_settings | settings
    assert changed(GIVEN, config).keys() <= {"runtime_settings"}
    assert notes == []
    SETTINGS.check(config.runtime_settings)


@pytest.mark.parametrize(("key", "text", "words"), NOTED)
def test_has_no_effect_and_a_note(key: str, text: str, words: str) -> None:
    check_fields_and_note(GIVEN, key, text, {}, words)


@pytest.mark.parametrize(("key", "text", "words"), REFUSED)
def test_is_refused(key: str, text: str, words: str) -> None:
    check_refused(GIVEN, key, text, words)


def test_every_row_of_its_own_is_tested() -> None:
    tested = {row[0] for row in (*FIELDS, *AS_SETTINGS, *NOTED, *REFUSED)}
    own = {key for key, rule in TENSORRT_LLM_RULES.items() if SHARED_RULES.get(key) is not rule}
    assert own <= tested


def test_fp8_is_one_kind() -> None:
    config, notes = apply_parameters(GIVEN, "m", {"kv_cache_dtype": "fp8_e5m2"})
    assert (config.kv_cache_dtype, notes) == ("fp8", ["kv_cache_dtype: fp8 is e4m3"])


def test_the_smaller_of_both_cache_sizes_holds() -> None:
    texts = {"max_tokens_in_paged_kv_cache": "20000", "kv_cache_free_gpu_mem_fraction": "0.5"}
    config, notes = apply_parameters(GIVEN, "m", texts)
    assert config.runtime_settings["kv_cache_config.max_tokens"] == "20000"
    assert (config.kv_cache_memory_fraction, config.kv_cache_memory_bytes, notes) == (0.5, None, [])


def test_what_only_engines_have_reaches_them(tmp_path: Path) -> None:
    texts = {"multi_block_mode": "true", "medusa_choices": "{0}, {0, 0}"}
    engine = msgspec.structs.replace(GIVEN, model_path=str(make_compiled_engine(tmp_path / "e")))
    config, notes = apply_parameters(engine, "m", texts)
    own = {
        "extended_runtime_perf_knob_config.multi_block_mode": "true",
        "speculative_config.medusa_choices": "{0}, {0, 0}",
    }
    assert config.runtime_settings == GIVEN.runtime_settings | own
    assert notes == []
    checkpoint = msgspec.structs.replace(GIVEN, model_path=str(make_checkpoint(tmp_path / "c")))
    assert len(apply_parameters(checkpoint, "m", texts)[1]) == 2
    assert apply_parameters(checkpoint, "m", texts | {"backend": "tensorrt"})[1] == []


def test_a_models_own_settings_win_over_the_command_lines_by_any_name() -> None:
    given = msgspec.structs.replace(
        GIVEN, runtime_settings={"kv_cache_host_memory_bytes": "1", "max_num_seqs": "7", "moe_config.backend": "TRTLLM"}
    )
    config, _ = apply_parameters(given, "m", {"host_cache_size": "2", "max_batch_size": "9"})
    assert config.runtime_settings == {"kv_cache_config.host_cache_size": "2", "moe_config.backend": "TRTLLM"}
    assert config.max_num_seqs == 9


def test_a_models_own_drafts_go_instead_of_the_command_lines() -> None:
    given = msgspec.structs.replace(GIVEN, speculation=Speculation.NGRAM)
    assert apply_parameters(given, "m", {"decoding_mode": "top_k_top_p"})[0].speculation is Speculation.NGRAM
    assert apply_parameters(given, "m", {"decoding_mode": "eagle"})[0].speculation is Speculation.OFF
    with pytest.raises(SluiceError, match="parameters 'decoding_mode' and 'speculation' of model 'm' contradict"):
        apply_parameters(given, "m", {"decoding_mode": "eagle", "speculation": "ngram"})


def test_two_names_of_one_setting_may_not_contradict() -> None:
    with pytest.raises(SluiceError, match="parameters 'block_size' and 'tokens_per_block' of model 'm' contradict"):
        apply_parameters(GIVEN, "m", {"block_size": "32", "tokens_per_block": "64"})


@pytest.mark.parametrize("key", TEMPLATE_KEYS.split())
def test_no_parameter_of_nvidias_templates_is_unknown(key: str) -> None:
    try:
        _, notes = apply_parameters(GIVEN, "m", {key: "1"})
    except SluiceError as error:
        assert error.param == key and "must be" in error.message
        return
    assert not any("unknown" in note for note in notes)
