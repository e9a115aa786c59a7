"""Which runtime serves a model of a repository, and with what: its folder and files over the command line."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sluice.engine.config import EngineConfig, Runtime
from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.llm.model_folder import CheckpointFolder, parameter_text
from sluice.pipelines.llm.setup import Setup, set_up
from sluice.serving.spec import ModelSource
from tests.serving.config.parts import parse_config
from tests.stand_ins.model_folders import make_checkpoint, make_compiled_engine, make_converted_checkpoint
from tests.stand_ins.paths import STAND_INS

GIVEN = EngineConfig(
    model_path="",
    num_threads=2,
    lora_modules={"of-model": "/of-model"},
    tokenizer_path="/of-model",
    llm_arguments={"stream_interval": 4, "kv_cache_config": {"use_uvm": True}},
)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM can be found; nobody here imports it."""
    monkeypatch.syspath_prepend(str(STAND_INS))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's, with an empty version 1."""
    path = tmp_path / "m"
    (path / "1").mkdir(parents=True)
    return path


def write_checkpoint(folder: Path) -> Path:
    """Write the part of a checkpoint that is looked at before anything loads it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    return folder


def set_up_as(folder: Path, given: EngineConfig = GIVEN, **parameters: str) -> Setup:
    config, _ = parse_config('backend: "tensorrtllm"', "config.pbtxt")
    config.name = folder.name
    for key, text in parameters.items():
        config.parameters[key].string_value = text
    source = ModelSource(folder, 1, config)

    def engine_config(path: str, runtime: Runtime | None) -> EngineConfig:
        return msgspec.structs.replace(given, model_path=path, runtime=runtime or given.runtime)

    return set_up(source, engine_config)


class TestRuntime:
    def test_where_tensorrt_llm_is_not_it_is_openvino(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        setup = set_up_as(folder, EngineConfig(model_path=""), gpt_model_path="/none", tensor_parallel_size="2")
        assert setup.choice.runtime is setup.engine.runtime is Runtime.OPENVINO
        assert setup.notes == ["tensor_parallel_size: the model runs on one device"]
        assert setup.engine.tensor_parallel_size == 1

    @pytest.mark.usefixtures("installed")
    def test_a_parameter_asks_for_tensorrt_llm(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        setup = set_up_as(folder, runtime="tensorrt_llm", tensor_parallel_size="2", max_beam_width="4")
        assert (setup.choice.runtime, setup.choice.reason) == (Runtime.TENSORRT_LLM, "it was asked for")
        assert setup.engine.runtime is Runtime.TENSORRT_LLM
        assert setup.engine.tensor_parallel_size == 2
        assert setup.engine.runtime_settings == {"max_beam_width": "4"}
        assert setup.notes == []

    @pytest.mark.usefixtures("installed")
    def test_a_models_word_wins_over_the_command_lines(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        given = msgspec.structs.replace(GIVEN, runtime=Runtime.TENSORRT_LLM)
        assert set_up_as(folder, given).engine.runtime is Runtime.TENSORRT_LLM
        assert set_up_as(folder, given, runtime="openvino").engine.runtime is Runtime.OPENVINO

    def test_it_must_be_installed(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        with pytest.raises(SluiceError, match=r"it was asked for.*not installed") as caught:
            set_up_as(folder, runtime="tensorrt_llm")
        assert caught.value.code is ErrorCode.UNAVAILABLE

    def test_an_unknown_one_is_refused(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        words = "parameter 'runtime' of model 'm' must be one of auto, openvino, tensorrt_llm, torch, vllm, got 'cuda'"
        with pytest.raises(SluiceError, match=words):
            set_up_as(folder, runtime="cuda")

    def test_options_that_openvino_lacks_are_noted(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        given = EngineConfig(model_path="", runtime=Runtime.OPENVINO, tensor_parallel_size=2, launcher=["srun"])
        assert set_up_as(folder, given).notes == [
            "--tensor-parallel-size: openvino has no use for it",
            "--engine-launcher: openvino has no use for it",
        ]


class TestFolders:
    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("make", [make_compiled_engine, make_converted_checkpoint])
    def test_what_only_tensorrt_llm_runs(self, tmp_path: Path, make: "object") -> None:
        assert callable(make)
        (tmp_path / "m").mkdir()
        made = make(tmp_path / "m" / "1")
        tokenizer = make_checkpoint(tmp_path / "tokenizer", with_tokenizer=True)
        setup = set_up_as(tmp_path / "m", tokenizer_dir=str(tokenizer))
        assert setup.checkpoint == CheckpointFolder(made, tokenizer)
        assert setup.choice.runtime is Runtime.TENSORRT_LLM
        assert setup.choice.reason.startswith("the folder holds a c")
        assert (setup.engine.model_path, setup.engine.tokenizer_path) == (str(made), str(tokenizer))

    @pytest.mark.usefixtures("installed")
    def test_nvidias_layout_with_an_engine_of_several_ranks(self, tmp_path: Path, folder: Path) -> None:
        engine = make_compiled_engine(tmp_path / "engines")
        (engine / "rank1.engine").touch()
        assert set_up_as(folder, gpt_model_path=str(engine)).engine.model_path == str(engine)
        assert set_up_as(folder, engine_dir=str(engine)).engine.model_path == str(engine)

    def test_without_tensorrt_llm_the_checkpoint_behind_the_tokenizer_serves(
        self, tmp_path: Path, folder: Path
    ) -> None:
        engine = make_compiled_engine(tmp_path / "engines")
        checkpoint = write_checkpoint(tmp_path / "checkpoint")
        setup = set_up_as(folder, gpt_model_path=str(engine), tokenizer_dir=str(checkpoint))
        assert (setup.engine.model_path, setup.engine.runtime) == (str(checkpoint), Runtime.OPENVINO)

    def test_without_either_it_says_what_to_do(self, tmp_path: Path, folder: Path) -> None:
        engine = make_compiled_engine(tmp_path / "engines")
        with pytest.raises(SluiceError) as caught:
            set_up_as(folder, gpt_model_path=str(engine))
        assert caught.value.code is ErrorCode.NOT_FOUND
        assert f"'{engine}/rank0.engine' is a compiled TensorRT-LLM engine" in caught.value.message
        assert "not installed here; put the HuggingFace checkpoint" in caught.value.message

    def test_a_converted_checkpoint_is_no_huggingface_checkpoint(self, tmp_path: Path) -> None:
        (tmp_path / "m").mkdir()
        made = make_converted_checkpoint(tmp_path / "m" / "1")
        with pytest.raises(SluiceError, match=f"'{made}' is a checkpoint converted for TensorRT-LLM, and"):
            set_up_as(tmp_path / "m")

    @pytest.mark.usefixtures("installed")
    def test_an_engine_without_its_config(self, folder: Path) -> None:
        (folder / "1" / "rank0.engine").touch()
        with pytest.raises(SluiceError, match=r"needs the config\.json that it was built with"):
            set_up_as(folder)

    def test_a_name_on_the_hub_is_no_folder(self, folder: Path) -> None:
        with pytest.raises(SluiceError, match="'acme/tiny' reads like a name on the Hugging Face hub: `hf download"):
            set_up_as(folder, model="acme/tiny")


@pytest.mark.usefixtures("installed")
class TestAdapters:
    def test_those_of_the_command_line_are_of_the_model_there(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        engine = set_up_as(folder, runtime="tensorrt_llm").engine
        assert (engine.lora_modules, engine.tokenizer_path) == ({}, None)

    def test_relative_folders_are_in_the_models(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        for name in ("sql", "all"):
            (folder / name).mkdir()
        engine = set_up_as(folder, runtime="tensorrt_llm", lora_modules="sql=sql,far=/far", lora_dir="all, /any").engine
        assert engine.lora_modules == {"sql": str(folder / "sql"), "far": "/far"}
        assert engine.runtime_settings == {"lora_dir": f"{folder}/all,/any"}

    def test_vllms_file(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        (folder / "1" / "multi_lora.json").write_text('{"sql": "/sql"}')
        (folder / "1" / "model.json").write_text(json.dumps({"enable_lora": True, "max_lora_rank": 16}))
        engine = set_up_as(folder, runtime="tensorrt_llm").engine
        assert engine.lora_modules == {"sql": "/sql"}
        assert engine.runtime_settings == {"lora_config.max_lora_rank": "16"}
        (folder / "1" / "multi_lora.json").write_text("[]")
        with pytest.raises(SluiceError, match=r"multi_lora\.json must be names of adapters"):
            set_up_as(folder, runtime="tensorrt_llm")
        (folder / "1" / "model.json").unlink()
        assert set_up_as(folder, runtime="tensorrt_llm").engine.lora_modules == {}


class TestModelYaml:
    YAML = """
        model: weights
        backend: pytorch
        tensor_parallel_size: 2
        max_batch_size: 16
        enable_chunked_prefill: true
        kv_cache_config: {free_gpu_memory_fraction: 0.5}
        triton_config: {max_batch_size: 0, decoupled: true, cancellation_check_period_ms: 100}
    """

    @pytest.mark.usefixtures("installed")
    def test_it_goes_to_the_class(self, folder: Path) -> None:
        weights = write_checkpoint(folder / "weights")
        (folder / "1" / "model.yaml").write_text(self.YAML)
        engine = set_up_as(folder, runtime="tensorrt_llm").engine
        assert (engine.model_path, engine.tensor_parallel_size) == (str(weights), 2)
        assert engine.llm_arguments == {
            "stream_interval": 4,
            "backend": "pytorch",
            "max_batch_size": 16,
            "enable_chunked_prefill": True,
            "kv_cache_config": {"use_uvm": True, "free_gpu_memory_fraction": 0.5},
        }

    def test_on_openvino_it_is_parameters(self, folder: Path) -> None:
        write_checkpoint(folder / "weights")
        (folder / "1" / "model.yaml").write_text(self.YAML)
        setup = set_up_as(folder, EngineConfig(model_path=""))
        assert (setup.engine.max_num_seqs, setup.engine.llm_arguments) == (16, {})
        assert setup.notes == [
            "backend: only TensorRT-LLM has it, and the model runs on OpenVINO",
            "cancellation_check_period_ms: nothing is polled: cancellations and statistics arrive at once",
            "tensor_parallel_size: the model runs on one device",
            "model.yaml: kv_cache_config: only TensorRT-LLM has these",
        ]

    @pytest.mark.usefixtures("installed")
    @pytest.mark.parametrize("runtime", ["openvino", "tensorrt_llm"])
    def test_processors_of_logits_have_no_effect(self, folder: Path, runtime: str) -> None:
        write_checkpoint(folder / "weights")
        (folder / "1" / "model.yaml").write_text(
            "model: weights\nlogits_post_processors: {guard: company.guards:json}\n"
        )
        setup = set_up_as(folder, EngineConfig(model_path=""), runtime=runtime)
        assert setup.engine.llm_arguments == {}
        assert setup.notes == [
            "model.yaml: logits_post_processors: no Python runs on logits here; a request that names a processor is "
            "refused"
        ]


CODE: dict[str, Any] = {
    "batched_logits_processor": "evil.Processor",
    "calib_config.calib_dataset": "/evil",
    "checkpoint_loader": "evil.Loader",
    "custom_tokenizer": "evil.Tokenizer",
    "custom_tokenizer.name": "evil.Tokenizer",
    "env_overrides": {"LD_PRELOAD": "/evil.so"},
    "env_overrides.LD_PRELOAD": "/evil.so",
    "kv_connector_config": {"connector_module": "evil", "connector_worker_class": "Worker"},
    "kv_connector_config.connector": "evil",
    "kv_connector_config.connector_module": "evil",
    "kv_connector_config.connector_scheduler_class": "Scheduler",
    "kv_connector_config.connector_worker_class": "Worker",
    "mpi_session": "evil.Session",
    "post_processor_hook": "evil.hook",
    "ray_worker_extension_cls": "evil.Extension",
    "ray_worker_nsight_options": {"t": "cuda"},
    "speculative_config.drafter": "evil.Drafter",
    "trust_remote_code": True,
}
"""Arguments of TensorRT-LLM, dotted or not, that choose code to run."""
NO_CODE = "what chooses code to run is taken from the command line alone, by --runtime-setting"


@pytest.mark.usefixtures("installed")
class TestCode:
    """A model may come with a request, so what it says chooses no code to run."""

    @pytest.mark.parametrize("name", CODE)
    def test_config_pbtxt_chooses_none(self, folder: Path, name: str) -> None:
        write_checkpoint(folder / "1")
        setup = set_up_as(folder, GIVEN, runtime="tensorrt_llm", **{name: parameter_text(CODE[name])})
        assert (setup.engine.runtime_settings, setup.engine.llm_arguments) == ({}, GIVEN.llm_arguments)
        assert setup.notes == [f"{name}: {NO_CODE}"]

    @pytest.mark.parametrize("name", CODE)
    def test_model_json_chooses_none(self, folder: Path, name: str) -> None:
        write_checkpoint(folder / "1")
        (folder / "1" / "model.json").write_text(json.dumps({name: CODE[name]}))
        setup = set_up_as(folder, GIVEN, runtime="tensorrt_llm")
        assert (setup.engine.runtime_settings, setup.notes) == ({}, [f"{name}: {NO_CODE}"])

    @pytest.mark.parametrize("name", CODE)
    def test_model_yaml_chooses_none(self, folder: Path, name: str) -> None:
        write_checkpoint(folder / "1")
        (folder / "1" / "model.yaml").write_text(json.dumps({name: CODE[name], "stream_interval": 8}))
        setup = set_up_as(folder, GIVEN, runtime="tensorrt_llm")
        assert setup.engine.llm_arguments == GIVEN.llm_arguments | {"stream_interval": 8}
        assert setup.notes == [f"model.yaml: {name}: {NO_CODE}"]

    def test_an_argument_that_no_known_version_has_is_noted_with_the_nearest(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        (folder / "1" / "model.yaml").write_text("{max_batch_sise: 8, kv_cache_config: {dtipe: fp8, dtype: fp8}}")
        first, second = set_up_as(folder, GIVEN, runtime="tensorrt_llm").notes
        assert first.startswith(
            "model.yaml: max_batch_sise is no argument of TensorRT-LLM 1.2 to 1.4 (did you mean max_batch"
        )
        assert second.startswith("model.yaml: kv_cache_config.dtipe is no argument")

    def test_nor_does_what_is_inside_a_configuration(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        (folder / "1" / "model.yaml").write_text("calib_config: {calib_dataset: /evil}\n")
        setup = set_up_as(folder, GIVEN, runtime="tensorrt_llm", calib_config='{"calib_dataset": "/evil"}')
        assert "calib_config" not in setup.engine.llm_arguments | setup.engine.runtime_settings
        assert setup.notes == [f"calib_config: {NO_CODE}", f"model.yaml: calib_config: {NO_CODE}"]

    def test_model_yaml_may_switch_it_off(self, folder: Path) -> None:
        write_checkpoint(folder / "1")
        off: dict[str, Any] = {
            "trust_remote_code": False,
            "custom_tokenizer": None,
            "kv_connector_config": None,
            "env_overrides": {},
        }
        (folder / "1" / "model.yaml").write_text(json.dumps(off))
        given = msgspec.structs.replace(GIVEN, llm_arguments={"trust_remote_code": True})
        setup = set_up_as(folder, given, runtime="tensorrt_llm")
        assert (setup.engine.llm_arguments, setup.notes) == (off, [])

    @pytest.mark.parametrize("name", CODE)
    def test_the_command_line_chooses_it(self, folder: Path, name: str) -> None:
        write_checkpoint(folder / "1")
        given = msgspec.structs.replace(
            GIVEN, runtime_settings={name: parameter_text(CODE[name])}, llm_arguments={name: CODE[name]}
        )
        setup = set_up_as(folder, given, runtime="tensorrt_llm")
        assert setup.engine.runtime_settings == given.runtime_settings
        assert (setup.engine.llm_arguments, setup.notes) == (given.llm_arguments, [])


def test_a_model_names_its_chat_formats(folder: Path) -> None:
    write_checkpoint(folder / "1")
    found = set_up_as(folder, runtime="openvino", tool_call_parser="hermes", reasoning_parser="none")
    assert not any("parser" in note for note in found.notes)
    with pytest.raises(SluiceError, match=r"model 'm': parameter reasoning_parser must be one of auto, .*got 'x'"):
        set_up_as(folder, runtime="openvino", reasoning_parser="x")
