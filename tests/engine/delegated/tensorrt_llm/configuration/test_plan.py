"""From a configuration to the arguments of the LLM class, in every version."""

import json
import re
import shlex
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from sluice.engine.config import EngineRole, Listening, SchedulerPolicy, Speculation
from sluice.engine.delegated.tensorrt_llm.library import TensorRtLlmLibrary
from sluice.engine.delegated.tensorrt_llm.samplers import SamplerKind
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.tensorrt_llm.configuration.conftest import Plan
from tests.engine.delegated.tensorrt_llm.flavours import ONLY_1_2, ONLY_1_3, ONLY_1_4
from tests.paths import DOCS
from tests.stand_ins.model_folders import MAX_POSITIONS, make_checkpoint, make_compiled_engine


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


@pytest.mark.parametrize(
    ("fields", "settings", "size"),
    [
        ({"is_replica": True}, {}, 65536),
        ({"listening": Listening(endpoints=["tcp://127.0.0.1:0"])}, {}, 65536),
        ({"kv_events_endpoint": "tcp://*:5557"}, {}, 65536),
        ({}, {}, 0),
        ({}, {"kv_cache_config.event_buffer_max_size": "9"}, 9),
        ({"is_replica": True}, {"enable_block_reuse": "false"}, 0),
        ({"is_replica": True}, {"enable_attention_dp": "true"}, 0),
    ],
)
def test_events_of_the_cache_are_on_where_somebody_may_follow_them(
    plan: Plan, fields: dict[str, Any], settings: dict[str, str], size: int
) -> None:
    assert plan(settings=settings, **fields).arguments["kv_cache_config"].event_buffer_max_size == size


@ONLY_1_4
def test_events_that_are_published_are_not_fetched_too(plan: Plan, flavour: str) -> None:
    events = json.dumps({"enable_kv_cache_events": True})
    cache = plan(settings={"kv_cache_config.kv_events_config": events}, is_replica=True).arguments["kv_cache_config"]
    assert (cache.kv_events_config.endpoint, cache.event_buffer_max_size) == ("tcp://*:5557", 0)


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


def test_a_configuration_that_is_null_is_its_default(plan: Plan) -> None:
    assert plan(settings={"kv_cache_config": "null"}).arguments == plan().arguments


def test_an_empty_limit_is_the_default(plan: Plan) -> None:
    raw = {"max_batch_size": None, "max_seq_len": None, "kv_cache_config": None}
    planned = plan(max_num_seqs=8, llm_arguments=raw)
    assert (planned.max_num_seqs, planned.max_model_len) == (8, MAX_POSITIONS)


def test_sources_that_agree_are_one(plan: Plan) -> None:
    assert plan(max_num_seqs=8, settings={"max_batch_size": "8"}).max_num_seqs == 8


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


def test_batching_in_flight_is_what_pytorch_does(plan: Plan) -> None:
    planned = plan(settings={"gpt_model_type": "inflight_fused_batching"})
    assert "batching_type" not in planned.arguments
    assert planned.notes == ("gpt_model_type has no effect: the PyTorch backend always batches in flight",)


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


# -- what is refused or noted


def asked(raw: dict[str, Any] | None = None, /, **settings: str) -> dict[str, Any]:
    """Return what `plan` takes, of raw arguments and settings."""
    return {"settings": settings, **({} if raw is None else {"llm_arguments": raw})}


BOTH = "1.2.1 1.3.0"
# fmt: off
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    # sources that contradict each other
    (BOTH, {"max_num_seqs": 8, **asked(max_batch_size="16")}, "max_batch_size asks for max_batch_size=16 and max_num"),
    (BOTH, {"kv_cache_memory_fraction": 0.5, **asked(free_gpu_memory_fraction="0.6")}, "kv_cache_memory_fraction"),
    (BOTH, asked(cuda_graphs="off", **{"cuda_graph_config.batch_sizes": "[1]"}), "config=None; give one of them"),
    (BOTH, {"num_blocks": 4, **asked(kv_cache_max_tokens="5")}, "num_blocks asks for kv_cache_config.max_tokens=128"),
    (BOTH, {"speculation": Speculation.NGRAM, **asked(decoding_mode="eagle")}, "decoding_type='Eagle'"),
    # raw arguments
    (BOTH, asked({"max_batchsize": 4}), r"has no argument max_batchsize \(did you mean max_batch_size"),
    (BOTH, asked({"kv_cache_config": {"max_tokenz": 4}}), r"kv_cache_config.max_tokenz \(did you mean max_tokens"),
    (BOTH, asked({"moe_config": {"backend": "CUBLAS"}}), "refuses moe_config: .*CUTLASS"),
    (BOTH, asked({"kv_cache_config": {"max_tokens": "many"}}), "refuses kv_cache_config: .*max_tokens"),
    (BOTH, asked({"model": "/other"}), "llm_arguments must not have model"),
    (BOTH, asked({"scheduler_config": {"capacity_scheduler_policy": "FIFO"}}), "must be one of MAX_UTILIZATION, GUAR"),
    (BOTH, asked({"max_batch_size": "8"}), "llm_arguments.max_batch_size must be a whole number of 1 or more, got '8'"),
    (BOTH, asked({"kv_cache_config": {"tokens_per_block": 0}}), "per_block must be a whole number of 1 or more, got 0"),
    (BOTH, asked({"tensor_parallel_size": "two"}), "parallel_size must be a whole number of 1 or more, got 'two'"),
    (BOTH, asked({"context_parallel_size": 1.5}), "context_parallel_size must be a whole number of 1 or more, got 1.5"),
    (BOTH, asked({"backend": "_autodeploy"}), "llm_arguments.backend must be pytorch or tensorrt for a huggingface"),
    (BOTH, asked({"max_batch_size": 2048}), r"max_num_tokens must be at least max_batch_size \(2048\).* got 512"),
    # what the model cannot do
    (BOTH, {"kv_cache_dtype": "u8"}, "dtype must be one of auto, fp8, nvfp4 with TensorRT-LLM, got 'u8'"),
    (BOTH, {"dtype": "int8"}, "dtype must be one of auto, bf16, f32, float16 with TensorRT-LLM"),
    (BOTH, {"max_model_len": MAX_POSITIONS + 1}, f"must be 1 to {MAX_POSITIONS}, what the model was made"),
    (BOTH, asked(max_seq_len="9999"), "max_seq_len must be 1 to"),
    (BOTH, {"quantization": "int8"}, "quantization int8 cannot be had from .* which is not quantised"),
    # what only compiled engines, or other versions, have
    (BOTH, asked(multi_block_mode="true"), "only compiled engines"),
    (BOTH, asked(gpt_model_type="V1"), "only compiled engines"),
    (BOTH, asked(**{"scheduler_config.dynamic_batch_config": "{}"}), "only compiled engines"),
    (BOTH, asked(**{"quant_config.quant_algo": "FP8"}), "only compiled engines"),
    *(("1.2.1", asked(**{name: "10"}), rf"TensorRT-LLM 1\.2\.1 has no argument {name}; 1\.3 or 1\.4 can have it")
      for name in ("scheduler_config.waiting_queue_policy", "max_stats_len", "pp_partition",
                   "cache_transceiver_config.transceiver_runtime")),
    ("1.3.0", asked(fail_fast_on_attention_window_too_large="true"), r"1\.2 can have it"),
    ("1.4.0", asked(sampler_type="TRTLLMSampler"), r"1\.4\.0 has no argument sampler_type; 1\.2 or 1\.3 can have it"),
    ("1.4.0", asked(disable_flashinfer_sampling="true"), r"no argument disable_flashinfer_sampling; 1\.3 can have it"),
    # beams
    ("1.2.1 1.3.0rc5", asked(max_beam_width="4"), r"must be 1, got 4: in TensorRT-LLM .* every request.*1\.3\.0rc25"),
    ("1.3.0", asked(max_beam_width="2", speculative_decoding_type="MTP"), "1 with speculation by one model, got 2"),
]
# fmt: on


@pytest.mark.parametrize(
    ("flavour", "fields", "message"),
    [(flavour, *rest) for flavours, *rest in REFUSED for flavour in flavours.split()],
    indirect=["flavour"],
)
def test_what_cannot_be_is_refused_by_name(plan: Plan, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SluiceError, match=message) as refused:
        plan(**fields)
    error = refused.value
    assert error.code is (ErrorCode.UNIMPLEMENTED if "can have it" in error.message else ErrorCode.INVALID)
    assert error.param is not None and error.param.removeprefix("llm_arguments.") in error.message


@pytest.mark.parametrize("name", ["kv_cache_config", "scheduler_config", "speculative_config", "lora_config"])
@pytest.mark.parametrize("value", [5, [1], "none at all", True])
def test_a_configuration_without_fields_is_refused_by_name(plan: Plan, name: str, value: Any) -> None:
    for fields in (asked(**{name: json.dumps(value)}), asked({name: value})):
        with pytest.raises(SluiceError, match=rf"{name} must be an object of its fields, got {re.escape(repr(value))}"):
            plan(**fields)


@pytest.mark.parametrize(
    ("flavour", "settings"),
    [
        ("1.2.1", {"fail_fast_on_attention_window_too_large": "true"}),
        ("1.3.0", {"scheduler_config.waiting_queue_policy": "fcfs", "max_stats_len": "10", "pp_partition": "[1, 2]"}),
        ("1.3.0", {"cache_transceiver_config.transceiver_runtime": "CPP"}),
    ],
    indirect=["flavour"],
)
def test_what_a_version_alone_has_is_taken_there(plan: Plan, settings: dict[str, str]) -> None:
    assert {target.partition(".")[0] for target in settings} <= plan(settings=settings).arguments.keys()


@pytest.mark.parametrize(
    ("flavour", "fields", "notes"),
    [
        (
            "1.3.0",
            {"num_threads": 4, "settings": {"FORCE_CPU_ONLY_INPUT_TENSORS": "no"}},
            (
                "num_threads has no effect: TensorRT-LLM has no use for it",
                "FORCE_CPU_ONLY_INPUT_TENSORS has no effect: tensors of requests are read by this server",
            ),
        ),
        # NVIDIA's filled template and files for 1.2 have these
        (
            "1.4.0",
            asked({"sampler_type": "TorchSampler"}, kv_cache_onboard_blocks="true"),
            (
                "kv_cache_onboard_blocks has no effect: TensorRT-LLM 1.4.0 always copies offloaded blocks back",
                "llm_arguments.sampler_type has no effect: TensorRT-LLM 1.4.0 has TorchSampler alone",
            ),
        ),
        (
            "1.4.0",
            asked(sink_token_length="4"),
            ("sink_token_length is deprecated in TensorRT-LLM 1.4.0, which may ignore it",),
        ),
    ],
    indirect=["flavour"],
)
def test_what_has_no_effect_is_noted(plan: Plan, fields: dict[str, Any], notes: tuple[str, ...]) -> None:
    assert plan(**fields).notes == notes


def test_a_version_that_is_newer_than_the_lists_starts_with_one_note(
    plan: Plan, package: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(package, "__version__", "1.5.0rc1")
    assert plan().notes == ("TensorRT-LLM 1.5.0rc1 is newer than 1.4, the last that is known here",)


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


@ONLY_1_2
def test_an_engine_compiled_for_beams_is_refused(plan: Plan, tmp_path: Path) -> None:
    engine = make_compiled_engine(tmp_path / "beams", max_beam_width=4)
    with pytest.raises(SluiceError, match=r"was compiled for 4 beams: .*; compile it for max_beam_width 1"):
        plan(engine)


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


# -- prompts that are handed over


TRANSCEIVER_BACKEND = "cache_transceiver_config.backend"


@pytest.mark.parametrize(
    ("fields", "settings", "expected"),
    [
        ({}, {}, None),
        ({"has_prefill_replicas": True}, {}, ("DEFAULT", 30_000)),
        ({"role": EngineRole.PREFILL}, {"stall_timeout_s": "8"}, ("DEFAULT", 4000)),
        ({"has_prefill_replicas": True}, {TRANSCEIVER_BACKEND: "UCX"}, ("UCX", 30_000)),
        ({}, {"cache_transceiver_config": '{"backend": "NIXL", "kv_transfer_timeout_ms": 7}'}, ("NIXL", 7)),
    ],
)
def test_a_transfer_has_a_backend_and_a_limit(
    plan: Plan, fields: dict[str, Any], settings: dict[str, str], expected: tuple[str, int] | None
) -> None:
    arguments = plan(settings=settings, **fields).arguments
    config = arguments.get("cache_transceiver_config")
    assert (config and (config.backend, config.kv_transfer_timeout_ms)) == expected
    assert arguments.get("disable_overlap_scheduler") is (True if fields.get("role") else None)


@ONLY_1_2
def test_a_compiled_engine_hands_over_nothing(plan: Plan, compiled_engine: Path) -> None:
    assert "cache_transceiver_config" not in plan(compiled_engine, has_prefill_replicas=True).arguments
    with pytest.raises(SluiceError, match="role prefill is for models on the PyTorch backend"):
        plan(compiled_engine, role=EngineRole.PREFILL)


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
