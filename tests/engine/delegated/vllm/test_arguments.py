"""From an EngineConfig to vLLM's engine arguments."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice.engine.config import EngineConfig, Speculation, Task
from sluice.engine.delegated.vllm.arguments import check_adapter, plan_vllm
from sluice.engine.delegated.vllm.settings import SETTINGS
from sluice.errors import ErrorCode, SluiceError
from tests.engine.delegated.vllm.fake_library import FakeLibrary

ON_GPU = FakeLibrary(arguments=frozenset(SETTINGS) | {"model"})
ON_CPU = FakeLibrary(arguments=ON_GPU.arguments, on_cpu=True)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    return folder


def arguments(checkpoint: Path, library: FakeLibrary = ON_GPU, **fields: Any) -> dict[str, Any]:
    return plan_vllm(EngineConfig(model_path=str(checkpoint), **fields), library).arguments


def test_fields_get_vllms_names(checkpoint: Path) -> None:
    given = arguments(
        checkpoint, dtype="bf16", kv_cache_dtype="bf16", max_model_len=100, num_blocks=10, quantization="awq",
        max_num_seqs=4, max_num_batched_tokens=32, enable_prefix_caching=False, tensor_parallel_size=2,
    )  # fmt: skip
    assert given == {
        "model": str(checkpoint),
        "runner": "generate",
        "tokenizer": str(checkpoint),
        "skip_tokenizer_init": False,
        "dtype": "bfloat16",
        "kv_cache_dtype": "bfloat16",
        "max_model_len": 100,
        "num_gpu_blocks_override": 11,
        "quantization": "awq",
        "max_num_seqs": 4,
        "max_num_batched_tokens": 32,
        "enable_prefix_caching": False,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 1,
        "structured_outputs_config": {"backend": "guidance"},
        "enable_logging_iteration_details": True,
    }


@pytest.mark.parametrize(("task", "file"), [(Task.EMBED, "modules.json"), (Task.SCORE, "config.json")])
def test_what_the_folder_is_for_is_pooled_and_takes_no_generation(checkpoint: Path, task: Task, file: str) -> None:
    (checkpoint / file).write_text('{"architectures": ["BertForSequenceClassification"]}')
    plan = plan_vllm(EngineConfig(model_path=str(checkpoint)), ON_GPU)
    assert (plan.task, plan.arguments["runner"], plan.arguments["enable_prefix_caching"]) == (task, "pooling", None)
    assert arguments(checkpoint, enable_prefix_caching=False)["enable_prefix_caching"] is False
    with pytest.raises(SluiceError, match=f"lora_modules must be left out where vLLM serves a model for {task}"):
        arguments(checkpoint, lora_modules={"a": "/a"})
    with pytest.raises(SluiceError, match="speculation must be left out"):
        arguments(checkpoint, speculation=Speculation.NGRAM)


def test_settings_go_over_fields_and_arguments_over_both(checkpoint: Path) -> None:
    settings = {"max_num_seqs": "8", "enforce_eager": "true", "gpu_memory_utilization": "0.5"}
    given = arguments(checkpoint, runtime_settings=settings, llm_arguments={"enforce_eager": False})
    assert (given["max_num_seqs"], given["enforce_eager"], given["gpu_memory_utilization"]) == (8, False, 0.5)


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"method": "ngram"}', {"method": "ngram"}), ("[1, 2]", [1, 2]), ("plain", "plain")],
)
def test_settings_that_are_objects(checkpoint: Path, text: str, value: Any) -> None:
    assert arguments(checkpoint, runtime_settings={"speculative_config": text})["speculative_config"] == value


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"enforce_eagre": "true"}, "knows no setting 'enforce_eagre' (did you mean enforce_eager"),
        ({"max_num_seqs": "many"}, "max_num_seqs must be none or a whole number"),
        ({"served_model_name": "x"}, "served_model_name must be left out: Sluice names"),
        ({"kv_events_config": "{"}, "kv_events_config must be JSON, got '{'"),
    ],
)
def test_wrong_settings_are_named(checkpoint: Path, settings: dict[str, str], words: str) -> None:
    with pytest.raises(SluiceError) as caught:
        arguments(checkpoint, runtime_settings=settings)
    assert words in caught.value.message and caught.value.code is ErrorCode.INVALID
    with pytest.raises(SluiceError, match="knows no setting 'enforce_eagre'"):
        arguments(checkpoint, llm_arguments={"enforce_eagre": True})


def test_an_argument_that_sluice_decides_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SluiceError, match=r"data_parallel_size must be left out: use --replicas.*got 2"):
        arguments(checkpoint, llm_arguments={"data_parallel_size": 2})


def test_an_argument_of_another_version_is_named(checkpoint: Path) -> None:
    old = FakeLibrary(arguments=frozenset({"max_num_seqs", "seed"}))
    with pytest.raises(SluiceError, match=r"vLLM 0\.32\.0 has no argument enforce_eager") as caught:
        arguments(checkpoint, old, runtime_settings={"enforce_eager": "true"})
    assert caught.value.code is ErrorCode.UNIMPLEMENTED


def test_a_cpu_gets_a_small_cache(checkpoint: Path) -> None:
    assert "kv_cache_memory_bytes" not in arguments(checkpoint)
    assert arguments(checkpoint, ON_CPU)["kv_cache_memory_bytes"] == 1 << 30
    assert arguments(checkpoint, ON_CPU, kv_cache_memory_bytes=5)["kv_cache_memory_bytes"] == 5
    share = {"gpu_memory_utilization": "0.1"}
    assert "kv_cache_memory_bytes" not in arguments(checkpoint, ON_CPU, runtime_settings=share)


def test_a_share_of_free_memory_is_refused(checkpoint: Path) -> None:
    with pytest.raises(SluiceError, match="gpu_memory_utilization"):
        arguments(checkpoint, kv_cache_memory_fraction=0.5)


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    plan = plan_vllm(EngineConfig(model_path=str(tmp_path)), ON_GPU)
    assert plan.arguments["skip_tokenizer_init"] and "structured_outputs_config" not in plan.arguments
    assert not plan.has_tokenizer


def test_speculation(checkpoint: Path) -> None:
    given = arguments(checkpoint, speculation=Speculation.NGRAM, num_speculative_tokens=5)
    expected = {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 5}
    assert given["speculative_config"] == expected
    given = arguments(checkpoint, speculation=Speculation.DRAFT_MODEL, draft_model_path="/d")
    assert given["speculative_config"] == {"model": "/d", "method": "draft_model", "num_speculative_tokens": 4}
    given = arguments(checkpoint, speculation=Speculation.NGRAM, runtime_settings={"spec_method": "suffix"})
    assert given["spec_method"] == "suffix" and "speculative_config" not in given
    with pytest.raises(SluiceError, match="draft_model_path must be given"):
        arguments(checkpoint, speculation=Speculation.DRAFT_MODEL)


def test_adapters_get_room(checkpoint: Path, tmp_path: Path) -> None:
    modules = {}
    for name, rank in (("a", 4), ("b", 20)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_config.json").write_text(json.dumps({"r": rank}))
        modules[name] = str(tmp_path / name)
    given = arguments(checkpoint, lora_modules=modules)
    assert (given["enable_lora"], given["max_loras"], given["max_lora_rank"]) == (True, 2, 32)
    given = arguments(checkpoint, lora_modules=modules, enable_lora=True)
    assert (given["max_loras"], given["max_lora_rank"]) == (4, 64)
    check_adapter("b", modules["b"], SimpleNamespace(max_lora_rank=20))
    for room, words in ((SimpleNamespace(max_lora_rank=16), "at most 16, got 20"), (None, "without LoRA")):
        with pytest.raises(SluiceError, match=words):
            check_adapter("b", modules["b"], room)
    (tmp_path / "b" / "adapter_config.json").write_text('{"r": 1000}')
    with pytest.raises(SluiceError, match="rank of at most 512, got 1000"):
        arguments(checkpoint, lora_modules=modules)
