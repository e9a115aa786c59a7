"""Options that only TensorRT-LLM obeys, and options whose defaults differ there."""

from pathlib import Path

import pytest

from sluice.engine.config import EngineConfig, Runtime
from sluice.gateway.options.command_line import parse_flags
from sluice.gateway.options.config import read_config
from sluice.gateway.options.option import OptionError
from sluice.pipelines.llm.setup import set_up
from sluice.serving.spec import ModelSource
from tests.serving.config.parts import parse_config
from tests.stand_ins.model_folders import make_checkpoint, make_compiled_engine
from tests.stand_ins.paths import STAND_INS


def engine(*argv: str, model: str = "/models/x", **environ: str) -> EngineConfig:
    return read_config(parse_flags(list(argv)), environ).engine(model)


def test_the_device_reaches_the_engine() -> None:
    assert engine("--runtime", "torch", "--device", "cpu").device == "cpu"
    assert engine("--runtime", "torch", SLUICE_DEVICE="cuda").device == "cuda"


@pytest.mark.slow
def test_every_option_reaches_the_engine(tmp_path: Path) -> None:
    extra = tmp_path / "extra.yaml"
    extra.write_text("kv_cache_config: {enable_partial_reuse: false}\nprint_iter_log: true\n")
    given = engine(
        *("--runtime", "tensorrt_llm", "-tp", "2", "--pp-size", "4", "--dtype", "float16", "--quantization", "fp8"),
        *("--kv-cache-dtype", "nvfp4", "--tokenizer", "/models/tokenizer"),
        *("--runtime-setting", "ep_size=8", "--runtime-setting", "lora_dir=/a,/b=c"),
        *(
            "--extra-llm-api-options",
            str(extra),
            "--lora-modules",
            f"sql={tmp_path}",
            "--lora-modules",
            f"chat={extra}",
        ),
        *("--engine-launcher", "mpirun -n 8 'trtllm-llmapi-launch'", "--engine-python", "/opt/python"),
    )
    assert given == EngineConfig(
        model_path="/models/x",
        runtime=Runtime.TENSORRT_LLM,
        tensor_parallel_size=2,
        pipeline_parallel_size=4,
        dtype="float16",
        quantization="fp8",
        kv_cache_dtype="nvfp4",
        tokenizer_path="/models/tokenizer",
        runtime_settings={"ep_size": "8", "lora_dir": "/a,/b=c"},
        llm_arguments={"kv_cache_config": {"enable_partial_reuse": False}, "print_iter_log": True},
        lora_modules={"sql": str(tmp_path), "chat": str(extra)},
        engine_python="/opt/python",
        launcher=["mpirun", "-n", "8", "trtllm-llmapi-launch"],
        max_num_seqs=given.max_num_seqs,
        max_num_batched_tokens=given.max_num_batched_tokens,
    )


def test_several_settings_in_one_variable() -> None:
    settings = engine(SLUICE_RUNTIME_SETTING="lora_dir=/a,/b; max_beam_width=4").runtime_settings
    assert settings == {"lora_dir": "/a,/b", "max_beam_width": "4"}


def test_an_argument_goes_through_by_nvidia_s_own_name() -> None:
    given = engine(
        "--engine-setting", "kv_cache_config.event_buffer_max_size=1024", "--engine-setting", "attn_backend=X"
    )
    assert given.runtime_settings == {"kv_cache_config.event_buffer_max_size": "1024", "attn_backend": "X"}


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--runtime", "cuda"), "--runtime must be one of auto, openvino, tensorrt_llm, torch, vllm, got 'cuda'"),
        (("-tp", "0"), "--tensor-parallel-size must be a whole number from 1 to 1024, got '0'"),
        (("--runtime-setting", "ep_size"), "--runtime-setting must be KEY=VALUE"),
        (("--runtime-setting", "ep_size=two"), "ep_size must be a whole number of 1 or more, got 'two'"),
        (("--engine-setting", "seed=x"), "seed must be none or a whole number, got 'x'"),
        (("--engine-setting", "event_buffer_max_size=9"), "(did you mean kv_cache_config.event_buffer_max_size?)"),
        (("--engine-setting", "kv_cache_config.max_tokenz=9"), "(did you mean kv_cache_config.max_tokens"),
        (("--runtime-setting", "max_beam_widht=2"), "setting 'max_beam_widht' (did you mean max_beam_width"),
        (
            ("--runtime-setting", "max_beam_width=2", "--runtime-setting", "max_beam_width=4"),
            "the setting 'max_beam_width' is given more than once",
        ),
        (("--lora-modules", "sql=/nowhere"), "--lora-modules must name folders that there are, got '/nowhere'"),
        (("--lora-modules", "/nowhere"), "--lora-modules must be NAME=FOLDER"),
        (("--engine-launcher", "mpirun 'x"), "--engine-launcher must be a command as a shell would split it"),
        (("--engine-launcher", " "), "--engine-launcher must be a command, such as"),
        (("--dtype", "float8"), "--dtype must be one of auto, bf16, f32, float16, got 'float8'"),
        (("--quantization", "fp3"), "--quantization must be one of none, int8, int4, fp8"),
        (("--extra-llm-api-options", "/nowhere.yaml"), "--extra-llm-api-options must be a YAML file of arguments"),
        (("--model-repository", "/r", "--tokenizer", "/t"), "--tokenizer belongs to MODEL"),
    ],
)  # fmt: skip
def test_refuses(argv: tuple[str, ...], words: str) -> None:
    with pytest.raises(OptionError) as caught:
        engine(*argv)
    assert words in str(caught.value)


def test_a_slip_in_the_file_is_told_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "extra.yaml"
    path.write_text("kv_cache_config:\n  dtype: fp8\n enable: true\n")
    words = rf"--extra-llm-api-options must be a YAML file .*\(line 3, column 2: .*\), got '{path}'"
    with pytest.raises(OptionError, match=words):
        engine("--config", str(path))


class TestSizesOfAStep:
    """TensorRT-LLM has other defaults than the CPU."""

    @pytest.mark.parametrize(
        ("argv", "sizes"),
        [
            ((), (256, 8192)),
            (("--max-num-batched-tokens", "128"), (128, 128)),
            (("--max-num-seqs", "4000"), (4000, 8192)),
            (("--max-num-seqs", "8", "--max-num-batched-tokens", "100"), (8, 100)),
        ],
    )
    def test_on_tensorrt_llm(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, argv: tuple[str, ...], sizes: tuple[int, int]
    ) -> None:
        monkeypatch.syspath_prepend(str(STAND_INS))
        given = engine("--runtime", "tensorrt_llm", *argv, model=str(make_checkpoint(tmp_path / "c")))
        assert (given.max_num_seqs, given.max_num_batched_tokens) == sizes

    def test_of_an_engine_they_are_what_it_was_compiled_for(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.syspath_prepend(str(STAND_INS))
        model = str(make_compiled_engine(tmp_path / "e", max_batch_size=24, max_num_tokens=3000))
        given = engine(model=model)
        assert (given.max_num_seqs, given.max_num_batched_tokens) == (24, 3000)
        assert engine("--max-num-seqs", "8", model=model).max_num_seqs == 8

    def test_what_a_setting_says_is_not_said_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two different values for one setting contradict each other."""
        monkeypatch.syspath_prepend(str(STAND_INS))
        given = engine("--runtime", "tensorrt_llm", "--runtime-setting", "max_batch_size=512")
        assert (given.max_num_seqs, given.max_num_batched_tokens) == (EngineConfig(model_path="").max_num_seqs, 8192)

    def test_of_a_model_that_names_its_runtime_they_are_that_ones(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """A step of a GPU's size would take the CPU longer than a heartbeat."""
        monkeypatch.syspath_prepend(str(STAND_INS))
        folder = tmp_path / "models" / "m"
        (make_checkpoint(folder / "1", with_tokenizer=True) / "model.safetensors").touch()
        config, _ = parse_config('backend: "tensorrtllm"', "config.pbtxt")
        options = read_config(parse_flags([]), {})
        for runtime, sizes in (("tensorrt_llm", (256, 8192)), ("openvino", (64, 2048))):
            config.parameters["runtime"].string_value = runtime
            given = set_up(ModelSource(folder, 1, config), options.engine).engine
            assert (given.max_num_seqs, given.max_num_batched_tokens) == sizes
