"""The table of settings: the values of texts, and the errors of those that cannot be used."""

from typing import Any

import pytest

from sluice.engine.config import EngineConfig
from sluice.engine.delegated.tensorrt_llm.configuration.arguments import DIRECT
from sluice.engine.delegated.tensorrt_llm.configuration.catalogue import CONFIGS, ENGINES, FIELDS, SETTINGS, VERSIONS
from sluice.errors import ErrorCode, SluiceError

ELSEWHERE = """
model_path num_blocks quantization speculation num_speculative_tokens draft_model_path lora_modules
max_queued_requests max_queued_tokens tenant_weights runtime runtime_settings llm_arguments engine_python launcher
listening
memory_share cache_path chooses_chunk max_replayed_tokens kv_host_cache_bytes kv_disk_cache kv_disk_cache_bytes
num_threads device task role enable_lora enable_sleep_mode kv_events_endpoint kv_events_replay_endpoint kv_events_topic
has_prefill_replicas is_replica
"""
"""Fields of EngineConfig that make arguments together with others; that the process around TensorRT-LLM obeys; and
that are refused, noted or without a meaning here."""


def test_every_field_of_the_configuration_has_its_place() -> None:
    """A new field is to be looked at."""
    known = sorted([*DIRECT, *ELSEWHERE.split()])
    assert known == sorted(EngineConfig.__struct_fields__)


def test_the_lists_name_known_places_and_whole_configurations() -> None:
    assert {place for places in FIELDS.values() for place in places} == {*VERSIONS, ENGINES}
    assert set(FIELDS) >= CONFIGS


def test_every_argument_is_a_setting_by_its_own_name() -> None:
    assert all(SETTINGS[name].target == name for name in FIELDS)


def test_every_row_that_operators_know_says_what_it_is() -> None:
    assert all(row.help for row in SETTINGS.groups["operators"])


@pytest.mark.parametrize(
    ("name", "text", "target", "value"),
    [
        ("kv_cache_free_gpu_mem_fraction", "0.85", "kv_cache_config.free_gpu_memory_fraction", 0.85),
        ("max_tokens_in_paged_kv_cache", "2560", "kv_cache_config.max_tokens", 2560),
        ("kv_cache_host_memory_bytes", "4Gi", "kv_cache_config.host_cache_size", 4 << 30),
        ("kv_cache_config.host_cache_size", "1.5GB", "kv_cache_config.host_cache_size", 1_500_000_000),
        ("enable_kv_cache_reuse", "True", "kv_cache_config.enable_block_reuse", True),
        ("max_attention_window_size", "2048,4096", "kv_cache_config.max_attention_window", [2048, 4096]),
        ("kv_cache_dtype", "FP8", "kv_cache_config.dtype", "fp8"),
        ("batch_scheduler_policy", "max_utilization", "scheduler_config.capacity_scheduler_policy", "MAX_UTILIZATION"),
        ("gpt_model_type", "inflight_fused_batching", "batching_type", "INFLIGHT"),
        ("gpt_model_type", "V1", "batching_type", "STATIC"),
        ("cuda_graphs", "off", "cuda_graph_config", None),
        ("enforce_eager", "true", "cuda_graph_config", None),
        ("enforce_eager", "false", "cuda_graph_config", {}),
        ("cuda_graph_config.batch_sizes", "[1, 2, 4]", "cuda_graph_config.batch_sizes", [1, 2, 4]),
        ("cuda_graph_config", '{"max_batch_size": 8}', "cuda_graph_config", {"max_batch_size": 8}),
        ("orchestrator_type", "mpi", "orchestrator_type", None),
        ("dtype", "bf16", "dtype", "bfloat16"),
        ("lora_cache_gpu_memory_fraction", "0.1", "peft_cache_config.device_cache_percent", 0.1),
        ("medusa_choices", "{0, 0, 0}, {0, 1}", "speculative_config.medusa_choices", [[0, 0, 0], [0, 1]]),
        ("eagle_choices", "[[0], [0, 1]]", "speculative_config.eagle_choices", [[0], [0, 1]]),
        ("eagle_choices", "{{0}, {1}}", "speculative_config.eagle_choices", [[0], [1]]),
        ("decoding_mode", "medusa", "speculative_config.decoding_type", "Medusa"),
        ("decoding_mode", "top_k_top_p", "speculative_config.decoding_type", "none"),
        ("num_speculative_tokens", "5", "speculative_config.max_draft_len", 5),
        ("guided_decoding_backend", "none", "guided_decoding_backend", None),
        ("kv_cache_config.use_kv_cache_manager_v2", "auto", "kv_cache_config.use_kv_cache_manager_v2", "auto"),
        ("kv_cache_config.use_kv_cache_manager_v2", "True", "kv_cache_config.use_kv_cache_manager_v2", True),
        ("batch_wait_timeout_ms", "2.5", "batch_wait_timeout_ms", 2.5),
        ("attn_backend", "FLASHINFER", "attn_backend", "FLASHINFER"),
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
        ("host_cache_size", "lots", "a number of bytes, as 1073741824 or 1Gi"),
        ("max_attention_window_size", "2048,,", "values with commas between"),
        ("max_attention_window_size", "2048,x", "values with commas between, each a whole number of 1 or more"),
        ("medusa_choices", "{0, 1", r"paths as {0, 0}, {0, 1}"),
        ("medusa_choices", "{}", r"paths as {0, 0}, {0, 1}"),
        ("stall_timeout_s", "-1", "a number of 0 or more"),
    ],
)
def test_a_wrong_text_is_named_with_what_it_must_be(name: str, text: str, expected: str) -> None:
    with pytest.raises(SluiceError) as refused:
        SETTINGS.check({name: text})
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, name)
    assert refused.value.message.startswith(f"{name} must be {expected}")
    assert refused.value.message.endswith(f"got {text!r}")


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("max_batchsize", r"\(did you mean max_batch_size"),
        ("kv_cache_config.max_tokenz", r"\(did you mean kv_cache_config.max_tokens"),
        ("event_buffer_max_size", r"\(did you mean kv_cache_config.event_buffer_max_size\?\)"),
        ("cuda_graph_batch_sizes", r"\(did you mean cuda_graph_config.batch_sizes\?\)"),
        ("zzzz", "; docs/tensorrt-llm.md lists them"),
    ],
)
def test_an_unknown_name_is_refused_with_those_that_are_near(name: str, near: str) -> None:
    with pytest.raises(SluiceError, match=f"knows no setting '{name}'.*{near}") as refused:
        SETTINGS.check({name: "4"})
    assert refused.value.param == name


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
