"""Effects of config.pbtxt and model.json parameters on vLLM."""

import msgspec
import pytest

from sluice.engine.config import EngineConfig, Runtime
from sluice.errors import SluiceError
from sluice.pipelines.llm.parameters import apply_parameters, without_code

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
        ("compilation_config", '{"inductor_passes": {"post_grad_custom_post_pass": "evil.pass_over"}}'),
        ("compilation_config", '{"inductor_compile_config": {"cpp.cxx": "/tmp/evil"}}'),
        ("compilation_config", '{"cache_dir": "/tmp/evil"}'),
        ("distributed_executor_backend", "evil.Executor"),
        ("ec_manager_config", '{"encoder_cache_manager_cls": "evil.Manager"}'),
        ("spec_method", "custom_class"),
        ("spec_model", "evil.Proposer"),
        ("speculative_config", '{"model": "evil.Proposer", "num_speculative_tokens": 2}'),
        ("speculative_config", '{"method": "custom_class", "model": "evil"}'),
        ("structured_outputs_config", '{"reasoning_parser_plugin": "/tmp/evil.py"}'),
    ],
)
def test_a_model_chooses_no_code(name: str, text: str) -> None:
    engine, [note] = apply_parameters(VLLM, "m", {name: text})
    assert engine.runtime_settings == {} and "from the command line alone" in note


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("distributed_executor_backend", "mp"),
        ("spec_model", "org/draft-1.5B"),
        ("speculative_config", '{"method": "ngram", "num_speculative_tokens": 2}'),
        ("structured_outputs_config", '{"backend": "guidance"}'),
        ("trust_remote_code", "false"),
        ("worker_cls", "auto"),
    ],
)
def test_what_chooses_no_code_is_the_models(name: str, text: str) -> None:
    engine, notes = apply_parameters(VLLM, "m", {name: text})
    assert (engine.runtime_settings, notes) == ({name: text}, [])


def test_nor_does_its_model_yaml() -> None:
    given = {"worker_cls": "evil.Worker", "compilation_config": {"backend": "evil.compile"}, "max_loras": 2}
    kept, notes = without_code(given, Runtime.VLLM)
    assert kept == {"max_loras": 2}
    assert [note.partition(":")[0] for note in notes] == ["worker_cls", "compilation_config"]


def test_a_model_may_switch_code_off_that_the_command_line_allows() -> None:
    given = msgspec.structs.replace(VLLM, runtime_settings={"trust_remote_code": "true"})
    assert apply_parameters(given, "m", {"trust_remote_code": "false"})[0].runtime_settings == {
        "trust_remote_code": "false"
    }


def test_a_model_chooses_how_it_is_compiled() -> None:
    engine, notes = apply_parameters(VLLM, "m", {"compilation_config": '{"mode": 3}', "num_threads": "2"})
    assert engine.runtime_settings == {"compilation_config": '{"mode": 3}'} and engine.num_threads is None
    assert notes[0].startswith("num_threads: vLLM takes all cores")


def test_what_is_wrong_is_named() -> None:
    with pytest.raises(SluiceError, match="'max_loras' of model 'm' must be none or a whole number"):
        apply_parameters(VLLM, "m", {"max_loras": "many"})
    assert apply_parameters(VLLM, "m", {"max_lorsa": "2"})[1] == ["max_lorsa: is unknown and has no effect"]
