"""Builds for TensorRT-LLM: the commands of its tools, and the repository around their results."""

import json
import shutil
from pathlib import Path

import pytest

from sluice.cli.build import building
from sluice.cli.repository.command import command as repository_command
from sluice.engine.model_folder import ModelFormat, model_format
from tests.cli.build.fake_tools import CONVERT_CHECKPOINT, FAILS, HF_PTQ, TRTLLM_BUILD, write_program, write_script
from tests.cli.build.parts import Build, names, tree
from tests.cli.doctor.builders import driver
from tests.stand_ins.paths import STAND_INS

pytestmark = pytest.mark.slow

DRY = ("--runtime", "tensorrt_llm", "--layout", "single", "--dry-run")
V12, V13 = ("--tensorrt-llm-version", "1.2.1"), ("--tensorrt-llm-version", "1.3.0")


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install stand-ins for TensorRT-LLM's and ModelOpt's examples, for the compiler, and for a GPU."""
    folder = tmp_path / "tools"
    write_script(folder / "models" / "core" / "llama" / "convert_checkpoint.py", CONVERT_CHECKPOINT)
    write_script(folder / "llm_ptq" / "hf_ptq.py", HF_PTQ)
    write_program(folder / "bin" / "trtllm-build", TRTLLM_BUILD)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=":")
    monkeypatch.setattr(building, "num_gpus", lambda: 1)
    monkeypatch.setattr(building, "read_driver", driver)
    return folder


def step(text: str, purpose: str) -> str:
    """Return the commands of one step."""
    return text.partition(f": {purpose}\n")[2].partition("\n\n")[0]


def config_of(repository: Path, model: str = "tiny") -> str:
    return (repository / model / "config.pbtxt").read_text()


def test_engines_of_a_plain_checkpoint(build: Build, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "models"
    sizes = ("--max-num-seqs", "32", "--max-model-len", "4096", "--max-num-batched-tokens", "2048")
    done = build(tiny, "--output", output, *DRY, *V12, "--compile", "--tensor-parallel-size", "2", *sizes)
    assert step(done.out, "convert the checkpoint for TensorRT-LLM's compiler") == (
        "python3 TensorRT-LLM/examples/models/core/llama/convert_checkpoint.py \\\n"
        f"  --model_dir {tiny} \\\n"
        f"  --output_dir {output}.work/tensorrt_llm_checkpoint \\\n"
        "  --dtype auto \\\n"
        "  --tp_size 2 \\\n"
        "  --pp_size 1"
    )
    assert step(done.out, "compile the engines") == (
        "trtllm-build \\\n"
        f"  --checkpoint_dir {output}.work/tensorrt_llm_checkpoint \\\n"
        f"  --output_dir {output}/tiny/1 \\\n"
        "  --gemm_plugin auto \\\n"
        "  --use_paged_context_fmha enable \\\n"
        "  --max_beam_width 1 \\\n"
        "  --max_batch_size 32 \\\n"
        "  --max_num_tokens 2048 \\\n"
        "  --max_seq_len 4096 \\\n"
        "  --max_input_len 4096 \\\n"
        "  --workers 2"
    )
    assert "git clone --depth 1 --branch v1.2.1 https://github.com/NVIDIA/TensorRT-LLM" in done.out
    assert f"mkdir -p {output}/tiny/tokenizer" in done.out
    assert 'key: "tokenizer_dir" value: { string_value: "tokenizer" }' in done.out


def test_engines_of_quantised_weights(build: Build, tiny: Path, tmp_path: Path) -> None:
    arguments = ("--quantization", "int4_awq", "--kv-cache-dtype", "fp8", "--compile", "--dtype", "bf16")
    done = build(tiny, *DRY, *V12, *arguments, "--calib-size", "64", "--calib-dataset", "my/texts")
    assert step(done.out, "quantise the checkpoint to int4_awq for TensorRT-LLM's compiler") == (
        "python3 TensorRT-LLM/examples/quantization/quantize.py \\\n"
        f"  --model_dir {tiny} \\\n"
        f"  --output_dir {tmp_path}/models.work/tensorrt_llm_checkpoint \\\n"
        "  --dtype bfloat16 \\\n"
        "  --qformat int4_awq \\\n"
        "  --kv_cache_dtype fp8 \\\n"
        "  --tp_size 1 \\\n"
        "  --pp_size 1 \\\n"
        "  --calib_size 64 \\\n"
        "  --calib_dataset my/texts"
    )


@pytest.mark.parametrize(("family", "stages"), [("gemma2", "1"), ("phi3", "2")])
def test_families_without_a_converter_go_through_quantize(
    build: Build, tiny: Path, tmp_path: Path, family: str, stages: str
) -> None:
    folder = shutil.copytree(tiny, tmp_path / "other")
    (folder / "config.json").write_text(json.dumps({"model_type": family, "architectures": ["X"]}))
    done = build(folder, *DRY, *V12, "--compile", "--pipeline-parallel-size", stages)
    command = step(done.out, "convert the checkpoint for TensorRT-LLM's compiler")
    assert "quantization/quantize.py" in command
    assert "--qformat full_prec" in command
    assert "--calib" not in command


@pytest.mark.parametrize("version", [V12, V13])
def test_a_quantised_checkpoint_of_either_version(
    build: Build, tiny: Path, tmp_path: Path, version: tuple[str, str]
) -> None:
    arguments = ("--quantization", "nvfp4", "--kv-cache-dtype", "fp8", "--tensor-parallel-size", "4")
    done = build(tiny, *DRY, *version, *arguments)
    assert f"for TensorRT-LLM {version[1]}" in done.out
    assert step(done.out, "quantise the checkpoint to nvfp4") == (
        "python3 Model-Optimizer/examples/llm_ptq/hf_ptq.py \\\n"
        f"  --pyt_ckpt_path {tiny} \\\n"
        f"  --export_path {tmp_path}/models/tiny/1 \\\n"
        "  --qformat nvfp4 \\\n"
        "  --kv_cache_qformat fp8 \\\n"
        "  --inference_tensor_parallel 4 \\\n"
        "  --calib_size 512"
    )
    assert 'key: "tensor_parallel_size" value: { string_value: "4" }' in done.out
    assert 'key: "kv_cache_dtype" value: { string_value: "fp8" }' in done.out
    assert 'key: "quantization"' not in done.out  # the checkpoint says it itself


def test_engines_are_made_and_get_their_tokenizer(
    build: Build, tiny: Path, tmp_path: Path, tools: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "models"
    arguments = ("--tensorrt-llm-examples", tools, "--max-num-seqs", "8", "--tensor-parallel-size", "2", *V12)
    build(tiny, "--output", output, "--compile", *arguments)
    version = output / "tiny" / "1"
    assert model_format(version) is ModelFormat.TENSORRT_LLM_ENGINE
    assert {"rank0.engine", "rank1.engine", "config.json"} == names(version)
    assert {"tokenizer.json", "config.json", "generation_config.json"} <= names(output / "tiny" / "tokenizer")
    content = json.loads((output / "tiny" / "sluice-build.json").read_text())
    assert (content["runtime"], content["runtime_version"]) == ("tensorrt_llm", "1.2.1")
    assert content["tensor_parallel_size"] == 2
    assert content["model_format"] == "tensorrt_llm_engine"
    assert f"--output_dir {output}/tiny/1" in content["commands"][1]
    assert names(output) == {"tiny", "preprocessing", "postprocessing", "ensemble"}
    assert names(tmp_path) == {"models", "tools"}
    assert content["compute_capability"] == "9.0"
    monkeypatch.syspath_prepend(STAND_INS)
    assert repository_command(["check", "--strict", str(output)]) == 0


def test_a_quantised_checkpoint_is_made(build: Build, tiny: Path, tmp_path: Path, tools: Path) -> None:
    build(tiny, "--quantization", "fp8", "--modelopt-examples", tools, *V13)
    quantized = json.loads((tmp_path / "models" / "tiny" / "1" / "hf_quant_config.json").read_text())
    assert quantized["quantization"] == {"quant_algo": "FP8", "kv_cache_quant_algo": "none"}
    again = ("--output", tmp_path / "more", "--quantization", "fp8", "--name", "b", *V13)
    build(tmp_path / "models" / "tiny" / "1", *again, code=2, error="is quantised already (by modelopt)")


def test_an_engine_that_is_there_gets_a_repository(build: Build, tiny: Path, tmp_path: Path, tools: Path) -> None:
    build(tiny, "--compile", "--tensorrt-llm-examples", tools, *V12)
    engine = tmp_path / "models" / "tiny" / "1"
    more = ("--output", tmp_path / "more", "--name", "b")
    build(engine, *more, code=2, error="name a folder that has the model's with --tokenizer")
    build(engine, *more, "--tokenizer", tiny, "--layout", "single")
    assert tree(tmp_path / "more" / "b" / "1") == tree(engine)


def test_a_plain_checkpoint_needs_no_tool(build: Build, tiny: Path, tmp_path: Path) -> None:
    build(tiny, "--tensor-parallel-size", "2", "--dtype", "float16")
    assert tree(tmp_path / "models" / "tiny" / "1") == tree(tiny)
    config = config_of(tmp_path / "models")
    assert 'backend: "tensorrtllm"' in config
    assert 'key: "dtype" value: { string_value: "float16" }' in config


def test_a_tool_that_is_missing(build: Build, tiny: Path, tmp_path: Path) -> None:
    done = build(tiny, "--quantization", "fp8", *V13, code=1)
    assert "hf_ptq.py is not here, and needed to quantise the checkpoint to fp8" in done.err
    assert "git clone --depth 1 --branch 0.37.0 https://github.com/NVIDIA/Model-Optimizer" in done.err
    assert f"--export_path {tmp_path}/models/tiny/1" in done.err
    assert names(tmp_path) == set()


def test_a_tool_that_fails(build: Build, tiny: Path, tmp_path: Path, tools: Path) -> None:
    write_script(tools / "llm_ptq" / "hf_ptq.py", FAILS)
    ended = "the step to quantise the checkpoint to fp8 ended with exit code 3"
    build(tiny, "--quantization", "fp8", "--modelopt-examples", tools, *V13, code=1, error=ended)
    assert names(tmp_path) == {"tools"}


def test_no_gpu(build: Build, tiny: Path, tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "num_gpus", lambda: 0)
    needed = "there is no NVIDIA GPU here, and one is needed to quantise the checkpoint to fp8"
    build(tiny, "--quantization", "fp8", "--modelopt-examples", tools, *V13, code=1, error=needed)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--compile", *V13], "compiled engines ended with TensorRT-LLM 1.2, and this is 1.3.0"),
        (["--compile", "--tensorrt-llm-version", "1.3.0rc5"], "compiled engines ended with TensorRT-LLM 1.2"),
        (["--tensorrt-llm-version", "0.21"], "is older than 1.2"),
        (["--tensorrt-llm-version", "new"], "--tensorrt-llm-version must be a version such as 1.2.1, got 'new'"),
        (["--quantization", "int8_sq", *V12], "compiled engines have it (--compile, TensorRT-LLM 1.2)"),
        (["--quantization", "int8", *V12], "OpenVINO has it (--runtime openvino)"),
        (["--quantization", "int7", "--compile", *V12], "for tensorrt_llm with --compile, got 'int7'"),
        (["--kv-cache-dtype", "u8", *V12], "--kv-cache-dtype must be auto or fp8 for tensorrt_llm, got 'u8'"),
    ],
)
def test_what_a_version_cannot_do(build: Build, tiny: Path, arguments: list[str], error: str) -> None:
    assert build(tiny, *DRY, *arguments, code=2, error=error).out == ""
