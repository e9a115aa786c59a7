"""From a configuration to the arguments of the LLM class, in both versions."""

import json
import re
import shlex
import warnings
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.config import EngineConfig, Runtime, SchedulerPolicy, Speculation
from engine.delegated.tensorrt_llm.configuration.plan import LlmPlan, plan_llm
from engine.delegated.tensorrt_llm.folder import read_folder
from engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary, load_library
from engine.delegated.tensorrt_llm.samplers import SamplerKind
from pipelines.llm.parameters import apply_parameters
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2, ONLY_1_3, ONLY_1_4, imported
from tests.paths import DOCS
from tests.stand_ins.model_folders import BUILT, MAX_POSITIONS, make_checkpoint, make_compiled_engine

Plan = Callable[..., LlmPlan]


@pytest.fixture
def package(flavour: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    with imported(flavour, monkeypatch) as package:
        yield package


@pytest.fixture
def plan(package: ModuleType, checkpoint: Path) -> Plan:
    """`plan(folder, max_num_seqs=8, settings={"tp_size": "2"})`; the folder is a checkpoint where none is given."""

    def make(folder: Path = checkpoint, settings: dict[str, str] | None = None, **fields: Any) -> LlmPlan:
        config = EngineConfig(model_path=str(folder), runtime_settings=settings or {}, **fields)
        return plan_llm(config, read_folder(folder), load_library())

    return make


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


def make_adapter(folder: Path, rank: Any = 8, modules: Any = ("q_proj", "v_proj"), **more: Any) -> Path:
    folder.mkdir(parents=True)
    told = {"r": rank, "target_modules": list(modules) if isinstance(modules, tuple) else modules, **more}
    (folder / "adapter_config.json").write_text(json.dumps(told))
    (folder / "adapter_model.safetensors").touch()
    return folder


def test_a_plain_configuration(plan: Plan, package: ModuleType, checkpoint: Path) -> None:
    planned = plan()
    arguments = planned.arguments
    assert planned.llm_class is package.LLM
    assert arguments["model"] == str(checkpoint)
    assert (arguments["max_batch_size"], arguments["max_num_tokens"]) == (64, 512)
    assert (arguments["max_seq_len"], arguments["max_input_len"]) == (MAX_POSITIONS, MAX_POSITIONS)
    assert arguments["scheduler_config"].capacity_scheduler_policy.name == "GUARANTEED_NO_EVICT"
    assert arguments["kv_cache_config"].free_gpu_memory_fraction == 0.9
    assert arguments["kv_cache_config"].enable_block_reuse is True
    assert arguments["enable_chunked_prefill"] is True
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["enable_iter_perf_stats"] is True and arguments["return_perf_metrics"] is True
    assert planned.notes == () and planned.adapters == {} and planned.num_gpus == 1
    assert (planned.max_num_seqs, planned.max_num_batched_tokens, planned.max_model_len) == (64, 512, MAX_POSITIONS)
    assert (planned.max_beam_width, planned.tokens_per_block) == (1, 32)


def test_every_field_reaches_its_argument(plan: Plan) -> None:
    planned = plan(
        dtype="bf16",
        max_model_len=512,
        num_blocks=100,
        kv_cache_memory_bytes=1 << 30,
        kv_cache_memory_fraction=0.5,
        kv_cache_dtype="fp8",
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        scheduler_policy=SchedulerPolicy.MAX_UTILIZATION,
        enable_prefix_caching=False,
        tensor_parallel_size=2,
        pipeline_parallel_size=3,
    )
    arguments, cache = planned.arguments, planned.arguments["kv_cache_config"]
    assert (arguments["dtype"], arguments["max_seq_len"], arguments["max_input_len"]) == ("bfloat16", 512, 512)
    assert (cache.max_tokens, cache.max_gpu_total_bytes, cache.free_gpu_memory_fraction) == (3200, 1 << 30, 0.5)
    assert (cache.dtype, cache.enable_block_reuse) == ("fp8", False)
    assert (arguments["max_batch_size"], arguments["max_num_tokens"]) == (16, 1024)
    assert arguments["scheduler_config"].capacity_scheduler_policy.name == "MAX_UTILIZATION"
    assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"], planned.num_gpus) == (2, 3, 6)
    assert "enable_chunked_prefill" not in arguments, "an iteration holds the longest prompt"


def test_blocks_are_counted_by_their_size(plan: Plan) -> None:
    planned = plan(num_blocks=10, settings={"tokens_per_block": "64"})
    assert (planned.arguments["kv_cache_config"].max_tokens, planned.tokens_per_block) == (640, 64)


def test_settings_go_over_defaults_and_raw_arguments_over_all(plan: Plan) -> None:
    planned = plan(
        settings={
            "max_batch_size": "8",
            "kv_cache_free_gpu_mem_fraction": "0.4",
            "cuda_graph_config.batch_sizes": "[1, 2]",
        },
        llm_arguments={"max_batch_size": 4, "kv_cache_config": {"host_cache_size": 5}, "cuda_graph_config": None},
    )
    assert planned.arguments["max_batch_size"] == planned.max_num_seqs == 4
    assert planned.arguments["cuda_graph_config"] is None
    cache = planned.arguments["kv_cache_config"]
    assert (cache.free_gpu_memory_fraction, cache.host_cache_size) == (0.4, 5), "merged deep"


def test_a_setting_that_is_a_whole_configuration_is_one_of_its_fields(plan: Plan) -> None:
    whole = '{"tokens_per_block": 64, "max_tokens": 640, "enable_block_reuse": false}'
    planned = plan(kv_cache_dtype="fp8", settings={"kv_cache_config": whole, "host_cache_size": "5"})
    cache = planned.arguments["kv_cache_config"]
    assert (cache.tokens_per_block, cache.max_tokens, cache.enable_block_reuse) == (64, 640, False)
    assert (cache.dtype, cache.host_cache_size, planned.tokens_per_block) == ("fp8", 5, 64)


@pytest.mark.parametrize("name", ["kv_cache_config", "scheduler_config", "speculative_config", "lora_config"])
@pytest.mark.parametrize("value", [5, [1], "none at all", True])
def test_a_configuration_without_fields_is_refused_by_name(plan: Plan, name: str, value: Any) -> None:
    for asked in ({"settings": {name: json.dumps(value)}}, {"llm_arguments": {name: value}}):
        with pytest.raises(SluiceError, match=rf"{name} must be an object of its fields, got {re.escape(repr(value))}"):
            plan(**asked)


def test_a_configuration_that_is_null_is_its_default(plan: Plan) -> None:
    assert plan(settings={"kv_cache_config": "null"}).arguments == plan().arguments


@pytest.mark.parametrize(
    ("fields", "settings", "message"),
    [
        ({"max_num_seqs": 8}, {"max_batch_size": "16"}, "max_batch_size asks for max_batch_size=16 and max_num_seqs"),
        ({"kv_cache_memory_fraction": 0.5}, {"free_gpu_memory_fraction": "0.6"}, "kv_cache_memory_fraction"),
        (
            {},
            {"cuda_graphs": "off", "cuda_graph_config.batch_sizes": "[1]"},
            "cuda_graph_config=None; give one of them",
        ),
        ({"num_blocks": 4}, {"kv_cache_max_tokens": "5"}, "num_blocks asks for kv_cache_config.max_tokens=128"),
        ({"speculation": Speculation.NGRAM}, {"decoding_mode": "eagle"}, "decoding_type='Eagle'"),
    ],
)
def test_sources_that_contradict_each_other_are_refused(
    plan: Plan, fields: dict[str, Any], settings: dict[str, str], message: str
) -> None:
    with pytest.raises(SluiceError, match=message) as refused:
        plan(settings=settings, **fields)
    assert refused.value.code is ErrorCode.INVALID


def test_an_empty_limit_is_the_default(plan: Plan) -> None:
    raw = {"max_batch_size": None, "max_seq_len": None, "kv_cache_config": None}
    planned = plan(max_num_seqs=8, llm_arguments=raw)
    assert (planned.max_num_seqs, planned.max_model_len) == (8, MAX_POSITIONS)


def test_sources_that_agree_are_one(plan: Plan) -> None:
    assert plan(max_num_seqs=8, settings={"max_batch_size": "8"}).max_num_seqs == 8


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"max_batchsize": 4}, r"has no argument max_batchsize \(did you mean max_batch_size"),
        ({"kv_cache_config": {"max_tokenz": 4}}, r"kv_cache_config.max_tokenz \(did you mean max_tokens"),
        ({"moe_config": {"backend": "CUBLAS"}}, "refuses moe_config: .*CUTLASS"),
        ({"kv_cache_config": {"max_tokens": "many"}}, "refuses kv_cache_config: .*max_tokens"),
        ({"model": "/other"}, "llm_arguments must not have model"),
        ({"scheduler_config": {"capacity_scheduler_policy": "FIFO"}}, "must be one of MAX_UTILIZATION, GUARANTEED"),
        ({"max_batch_size": "8"}, "llm_arguments.max_batch_size must be a whole number of 1 or more, got '8'"),
        ({"kv_cache_config": {"tokens_per_block": 0}}, "tokens_per_block must be a whole number of 1 or more, got 0"),
        ({"backend": "_autodeploy"}, "llm_arguments.backend must be pytorch or tensorrt for a huggingface"),
        ({"max_batch_size": 2048}, r"max_num_tokens must be at least max_batch_size \(2048\).* got 512"),
    ],
)
def test_raw_arguments_are_checked_too(plan: Plan, raw: dict[str, Any], message: str) -> None:
    with pytest.raises(SluiceError, match=message):
        plan(llm_arguments=raw)


@pytest.mark.parametrize(
    ("settings", "target"),
    [
        ({"scheduler_config.waiting_queue_policy": "fcfs"}, "scheduler_config.waiting_queue_policy"),
        ({"max_stats_len": "10"}, "max_stats_len"),
        ({"pp_partition": "[1, 2]"}, "pp_partition"),
        ({"cache_transceiver_config.transceiver_runtime": "CPP"}, "cache_transceiver_config.transceiver_runtime"),
    ],
)
def test_what_only_1_3_has(plan: Plan, flavour: str, settings: dict[str, str], target: str) -> None:
    if flavour == "1.3.0":
        assert target.partition(".")[0] in plan(settings=settings).arguments
        return
    with pytest.raises(
        SluiceError, match=rf"TensorRT-LLM 1\.2\.1 has no argument {target}; 1\.3 or 1\.4 can have it"
    ) as no:
        plan(settings=settings)
    assert (no.value.code, no.value.param) == (ErrorCode.UNIMPLEMENTED, next(iter(settings)))


def test_what_only_1_2_has(plan: Plan, flavour: str) -> None:
    settings = {"fail_fast_on_attention_window_too_large": "true"}
    if flavour == "1.2.1":
        assert plan(settings=settings).arguments["fail_fast_on_attention_window_too_large"] is True
        return
    with pytest.raises(SluiceError, match=r"1\.2 can have it"):
        plan(settings=settings)


@ONLY_1_4
def test_what_newer_versions_do_anyway_is_left_out_with_a_note(plan: Plan) -> None:
    """NVIDIA's filled template and files for 1.2 have these."""
    planned = plan(
        settings={"kv_cache_onboard_blocks": "true"}, llm_arguments={"sampler_type": "TorchSampler"}, max_num_seqs=8
    )
    assert "sampler_type" not in planned.arguments
    assert planned.notes == (
        "kv_cache_onboard_blocks has no effect: TensorRT-LLM 1.4.0 always copies offloaded blocks back",
        "llm_arguments.sampler_type has no effect: TensorRT-LLM 1.4.0 has TorchSampler alone",
    )


@ONLY_1_4
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampler_type": "TRTLLMSampler"}, r"1\.4\.0 has no argument sampler_type; 1\.2 or 1\.3 can have it"),
        ({"disable_flashinfer_sampling": "true"}, r"has no argument disable_flashinfer_sampling; 1\.3 can have it"),
    ],
)
def test_what_newer_versions_cannot_do_is_refused(plan: Plan, settings: dict[str, str], message: str) -> None:
    with pytest.raises(SluiceError, match=message) as refused:
        plan(settings=settings)
    assert refused.value.code is ErrorCode.UNIMPLEMENTED


@ONLY_1_4
def test_what_the_version_calls_deprecated_is_noted(plan: Plan) -> None:
    assert plan(settings={"sink_token_length": "4"}).notes == (
        "sink_token_length is deprecated in TensorRT-LLM 1.4.0, which may ignore it",
    )


@ONLY_1_4
def test_values_are_the_installed_version_s(plan: Plan) -> None:
    """New words of enumerations need no change here."""
    arguments = plan(
        settings={"moe_config.backend": "AUTO", "kv_cache_config.use_kv_cache_manager_v2": "auto"}
    ).arguments
    assert arguments["moe_config"].backend == arguments["kv_cache_config"].use_kv_cache_manager_v2.upper() == "AUTO"


@pytest.mark.parametrize("flavour", ["1.2.1", "1.4.0"], indirect=True)
def test_use_is_reported_to_nobody_unless_asked_for(plan: Plan, flavour: str) -> None:
    if flavour == "1.2.1":
        assert "telemetry_config" not in plan().arguments
        return
    assert plan().arguments["telemetry_config"].disabled
    assert not plan(settings={"telemetry_config.disabled": "false"}).arguments["telemetry_config"].disabled


def test_a_default_that_the_version_lacks_is_left_out(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = dict(import_module("tensorrt_llm.llmapi.llm_args").TorchLlmArgs.model_fields)
    older = type("TorchLlmArgs", (), {"model_fields": fields})
    monkeypatch.setattr(TensorRtLlmLibrary, "arguments_class", lambda self, is_engine: older)
    given = plan().arguments
    for name in ("max_input_len", "max_beam_width", "return_perf_metrics"):
        del fields[name]
        assert plan().arguments == {key: value for key, value in given.items() if key in (*fields, "model")}


def test_a_version_that_is_newer_than_the_lists_starts_with_one_note(
    plan: Plan, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "__version__", "1.5.0rc1")
    assert plan().notes == ("TensorRT-LLM 1.5.0rc1 is newer than 1.4, the last that is known here",)


def test_settings_of_compiled_engines_are_refused_for_pytorch(plan: Plan) -> None:
    for name, text in (
        ("multi_block_mode", "true"),
        ("scheduler_config.dynamic_batch_config", "{}"),
        ("quant_config.quant_algo", "FP8"),
    ):
        with pytest.raises(SluiceError, match="only compiled engines") as refused:
            plan(settings={name: text})
        assert refused.value.param == name


def test_batching_in_flight_is_what_pytorch_does(plan: Plan) -> None:
    planned = plan(settings={"gpt_model_type": "inflight_fused_batching"})
    assert "batching_type" not in planned.arguments
    assert planned.notes == ("gpt_model_type has no effect: the PyTorch backend always batches in flight",)
    with pytest.raises(SluiceError, match="only compiled engines"):
        plan(settings={"gpt_model_type": "V1"})


def test_what_has_no_effect_is_noted(plan: Plan) -> None:
    planned = plan(num_threads=4, settings={"FORCE_CPU_ONLY_INPUT_TENSORS": "no"})
    assert planned.notes == (
        "num_threads has no effect: TensorRT-LLM has no use for it",
        "FORCE_CPU_ONLY_INPUT_TENSORS has no effect: tensors of requests are read by this server",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kv_cache_dtype": "u8"}, "kv_cache_dtype must be one of auto, fp8, nvfp4 with TensorRT-LLM, got 'u8'"),
        ({"dtype": "int8"}, "dtype must be one of auto, bf16, f32, float16 with TensorRT-LLM"),
        ({"max_model_len": MAX_POSITIONS + 1}, f"max_model_len must be 1 to {MAX_POSITIONS}, what the model was made"),
        ({"settings": {"max_seq_len": "9999"}}, "max_seq_len must be 1 to"),
        ({"quantization": "int8"}, "quantization int8 cannot be had from .* which is not quantised"),
    ],
)
def test_what_the_model_cannot_do_is_refused(plan: Plan, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SluiceError, match=message) as refused:
        plan(**fields)
    assert refused.value.code is ErrorCode.INVALID


def test_quantisation_that_the_checkpoint_has(plan: Plan, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "fp8", quantization_config={"quant_method": "fp8"})
    planned = plan(folder, quantization="fp8")
    assert (planned.quantization, "quant_config" in planned.arguments) == ("fp8", False)
    assert plan(folder).quantization == "fp8"
    with pytest.raises(SluiceError, match="which holds fp8"):
        plan(folder, quantization="nvfp4")


@ONLY_1_2
def test_an_engine_compiled_at_load_is_quantised(plan: Plan) -> None:
    planned = plan(quantization="int4", settings={"backend": "tensorrt"})
    assert planned.arguments["quant_config"].quant_algo.name == "W4A16"
    assert planned.quantization == "w4a16"
    assert "enable_iter_perf_stats" not in planned.arguments and "backend" not in planned.arguments


# -- speculation


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


# -- compiled engines


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


# -- adapters


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


# -- tokenizer, beams, samplers


def test_guided_decoding_has_the_tokenizer_of_the_folder(plan: Plan, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "model", with_tokenizer=True)
    planned = plan(folder)
    assert planned.arguments["guided_decoding_backend"] == "xgrammar"
    assert planned.arguments["tokenizer"] == str(folder)
    assert "skip_tokenizer_init" not in planned.arguments
    off = plan(folder, settings={"guided_decoding_backend": "none"}).arguments
    assert off["skip_tokenizer_init"] is True and "tokenizer" not in off
    assert plan(folder, speculation=Speculation.NGRAM).arguments["guided_decoding_backend"] == "xgrammar"
    unsure = plan(folder, settings={"speculative_decoding_type": "AUTO"})
    assert "guided_decoding_backend" not in unsure.arguments


def test_guided_decoding_elsewhere(plan: Plan, tmp_path: Path) -> None:
    tokenizer = make_checkpoint(tmp_path / "tokenizer", with_tokenizer=True)
    settings = {"guided_decoding_backend": "llguidance"}
    arguments = plan(tokenizer_path=str(tokenizer), settings=settings).arguments
    assert (arguments["guided_decoding_backend"], arguments["tokenizer"]) == ("llguidance", str(tokenizer))
    with pytest.raises(SluiceError, match="guided decoding needs the model's tokenizer") as refused:
        plan(settings=settings)
    assert refused.value.param == "tokenizer_path"


@ONLY_1_3
def test_beams_are_planned_where_requests_may_be_narrower(plan: Plan) -> None:
    planned = plan(settings={"max_beam_width": "4"})
    assert planned.max_beam_width == planned.arguments["max_beam_width"] == planned.sampler.max_beam_width == 4
    assert "cuda_graph_config" not in planned.arguments and planned.notes == ()


@pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0rc5"], indirect=True)
def test_beams_that_could_not_start_are_refused(plan: Plan, flavour: str) -> None:
    with pytest.raises(SluiceError, match=rf"must be 1, got 4: in TensorRT-LLM {flavour} every request") as refused:
        plan(settings={"max_beam_width": "4"})
    assert (refused.value.code, refused.value.param) == (ErrorCode.INVALID, "max_beam_width")
    assert "1.3.0rc25 or later" in refused.value.message


@ONLY_1_2
def test_an_engine_compiled_for_beams_is_refused(plan: Plan, tmp_path: Path) -> None:
    engine = make_compiled_engine(tmp_path / "beams", max_beam_width=4)
    with pytest.raises(SluiceError, match=r"was compiled for 4 beams: .*; compile it for max_beam_width 1"):
        plan(engine)


@ONLY_1_3
def test_beams_and_speculation_by_one_model_are_refused(plan: Plan) -> None:
    settings = {"max_beam_width": "2", "speculative_decoding_type": "MTP"}
    with pytest.raises(SluiceError, match="must be 1 with speculation by one model, got 2"):
        plan(settings=settings)


@pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0rc5", "1.3.0"], indirect=True)
def test_the_sampler_acts_on_all_fields_but_the_top_log_probabilities(plan: Plan, flavour: str) -> None:
    planned = plan()
    assert planned.sampler.refusals == {}
    assert "top_p_decay" in planned.sampling_fields
    assert planned.arguments.get("sampler_type") == (None if flavour == "1.3.0" else "TRTLLMSampler")


@pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0rc5", "1.3.0"], indirect=True)
@pytest.mark.parametrize(
    "asked",
    [
        {"settings": {"sampler_type": "TorchSampler"}},
        {"settings": {"sampler_type": "auto"}},
        {"speculation": Speculation.NGRAM},
    ],
)
def test_what_torch_sampler_ignored_once_is_refused_there(plan: Plan, flavour: str, asked: dict[str, Any]) -> None:
    planned = plan(**asked)
    assert planned.sampler.kind is SamplerKind.TORCH
    assert ("min_p" in planned.sampler.refusals) == (flavour != "1.3.0")
    assert ("top_p_decay" in planned.sampling_fields) == (flavour == "1.3.0")
    assert "beam_width" in planned.sampling_fields


@pytest.mark.parametrize("flavour", ["1.2.1", "1.3.0rc5", "1.3.0"], indirect=True)
def test_speculation_by_one_model_has_a_sampler_of_its_own(plan: Plan, flavour: str) -> None:
    planned = plan(settings={"speculative_decoding_type": "MTP"})
    assert planned.sampler.kind is SamplerKind.ONE_MODEL
    assert "allowed_token_ids" in planned.sampler.refusals
    told = getattr(planned.arguments["speculative_config"], "allow_advanced_sampling", None)
    assert told == {"1.2.1": None, "1.3.0rc5": True, "1.3.0": False}[flavour]


@ONLY_1_3
def test_penalties_with_speculation_need_their_argument(plan: Plan) -> None:
    speculation = {"decoding_type": "MTP", "num_nextn_predict_layers": 1, "enable_penalty": True}
    planned = plan(llm_arguments={"speculative_config": speculation})
    assert "presence_penalty" not in planned.sampler.refusals


@ONLY_1_2
def test_log_probabilities_of_an_engine_need_gathered_logits(plan: Plan, tmp_path: Path) -> None:
    plain = make_compiled_engine(tmp_path / "plain", gather_context_logits=False)
    assert set(plan(plain).sampler.refusals) == {"logprobs", "prompt_logprobs"}
    built = make_compiled_engine(tmp_path / "built", gather_context_logits=True)
    asked = plan(built, llm_arguments={"gather_generation_logits": True})
    assert asked.sampler.refusals == {}


# -- in words


def test_a_plan_reads_as_python(plan: Plan, checkpoint: Path) -> None:
    text = str(plan(num_blocks=4, max_num_seqs=8, settings={"kv_cache_dtype": "fp8"}))
    assert text.startswith(f"LLM(model={str(checkpoint)!r}, ")
    assert "max_batch_size=8" in text
    assert "kv_cache_config=KvCacheConfig(dtype='fp8', enable_block_reuse=True" in text
    assert "capacity_scheduler_policy=CapacitySchedulerPolicy.GUARANTEED_NO_EVICT" in text


@ONLY_1_3
def test_a_plan_shows_no_secrets(plan: Plan) -> None:
    text = str(plan(settings={"env_overrides": '{"HF_TOKEN": "hf_abc"}'}))
    assert "hf_abc" not in text and "env_overrides='...'" in text


DOCUMENTED = [
    dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
    for command in re.findall(r"sluice serve (?:.*\\\n)*.*", (DOCS / "tensorrt-llm.md").read_text())
    if "--engine-setting" in command
]
"""The settings of the commands on the page."""


@ONLY_1_4
@pytest.mark.parametrize("settings", DOCUMENTED, ids=lambda settings: next(iter(settings)))
def test_the_settings_of_the_documentation_are_taken(plan: Plan, settings: dict[str, str]) -> None:
    assert {target.partition(".")[0] for target in settings} <= plan(settings=settings).arguments.keys()


def test_the_documentation_has_settings() -> None:
    assert len(DOCUMENTED) == 2
