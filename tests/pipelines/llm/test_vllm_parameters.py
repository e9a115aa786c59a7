"""Effects of config.pbtxt and model.json parameters on vLLM."""

import pytest

from engine.config import EngineConfig, Runtime
from pipelines.llm.parameters import apply_parameters
from sluice.errors import SluiceError

VLLM = EngineConfig(model_path="/m", runtime=Runtime.VLLM)


def test_a_model_json_of_tritons_vllm_backend() -> None:
    texts = {
        "model": "/m",
        "disable_log_requests": "true",
        "gpu_memory_utilization": "0.5",
        "enforce_eager": "true",
        "max_model_len": "512",
        "seed": "1",
    }
    engine, notes = apply_parameters(VLLM, "m", texts)
    assert engine.max_model_len == 512
    assert engine.runtime_settings == {"gpu_memory_utilization": "0.5", "enforce_eager": "true", "seed": "1"}
    assert notes == ["disable_log_requests: requests are not logged"]


@pytest.mark.parametrize(("word", "dtype"), [("f32", "f32"), ("float32", "f32"), ("half", "float16")])
def test_precisions_have_any_of_their_names(word: str, dtype: str) -> None:
    assert apply_parameters(VLLM, "m", {"dtype": word})[0].dtype == dtype


def test_a_share_of_memory() -> None:
    engine, [note] = apply_parameters(VLLM, "m", {"kv_cache_free_gpu_mem_fraction": "0.4"})
    assert engine.runtime_settings == {"gpu_memory_utilization": "0.4"}
    assert "weights included" in note and engine.kv_cache_memory_fraction is None


def test_adapters() -> None:
    engine, notes = apply_parameters(VLLM, "m", {"enable_lora": "true", "lora_modules": "a=/a,b=/b"})
    assert engine.lora_modules == {"a": "/a", "b": "/b"} and not notes


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trust_remote_code", "true"),
        ("worker_cls", "evil.Worker"),
        ("compilation_config", '{"mode": 3, "backend": "evil.compile"}'),
    ],
)
def test_a_model_chooses_no_code(name: str, text: str) -> None:
    engine, [note] = apply_parameters(VLLM, "m", {name: text})
    assert engine.runtime_settings == {} and "from the command line alone" in note


def test_a_model_chooses_how_it_is_compiled() -> None:
    engine, notes = apply_parameters(VLLM, "m", {"compilation_config": '{"mode": 3}', "num_threads": "2"})
    assert engine.runtime_settings == {"compilation_config": '{"mode": 3}'} and engine.num_threads is None
    assert notes[0].startswith("num_threads: vLLM takes all cores")


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(SluiceError, match="'max_loras' of model 'm' must be none or a whole number"):
        apply_parameters(VLLM, "m", {"max_loras": "many"})
    assert apply_parameters(VLLM, "m", {"max_lorsa": "2"})[1] == ["max_lorsa: is unknown and has no effect"]
